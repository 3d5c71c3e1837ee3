// The core without Python: packing, checksums, the queue, the writer with its thread, resume and errors. Receives a
// scratch directory, prints each promise it has checked, and ends with 1 at the first broken one.

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "crc32.h"
#include "frame.h"
#include "isa.h"
#include "pack.h"
#include "pack_table.h"
#include "queue.h"
#include "writer.h"

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                \
    }                                                                               \
  } while (false)

namespace pyscan {
namespace {

std::string scratch;
constexpr uint64_t kCells = 100;

double FromBits(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

int16_t CodeOf(Isa isa, Transform transform, double value) {
  // Eight copies: every lane of a vector must say the same.
  const std::vector<double> cells(8, value);
  std::vector<int16_t> codes(8);
  Pack(isa, Codec::kLog2q8, transform, cells.data(), cells.size(), codes.data());
  for (const int16_t code : codes) CHECK(code == codes[0]);
  return codes[0];
}

// Between the points tested here, the code of a double cannot change: it is decided by the exponent, the interval and
// one comparison. So this holds for all doubles.
void TestCodeOfEveryDouble() {
  for (const Isa isa : Isas()) {
    for (const Transform transform : {Transform::kPlain, Transform::kRoot}) {
      const long double factor = transform == Transform::kRoot ? 128.0L : 256.0L;
      const uint64_t* table = Log2Table(transform);
      int previous = -40000;
      for (uint64_t exponent = 1023 - 260; exponent <= 1023 + 260; ++exponent) {
        for (uint64_t interval = 0; interval < 512; ++interval) {
          const uint64_t first = interval << 43;
          const uint64_t last = first | (kMantissaMask >> 9);
          const uint64_t limit = std::min(table[interval] & kMantissaMask, last);
          for (const uint64_t mantissa : {first, limit, std::min(limit + 1, last), last}) {
            const double value = FromBits(exponent << 52 | mantissa);
            const int code = CodeOf(isa, transform, value);
            CHECK(code >= previous);
            previous = code;
            const long double exact = factor * std::log2(static_cast<long double>(value));
            if (std::fabs(exact) < 32765.0L) CHECK(std::fabs(code - exact) <= 0.5L + 1e-12L);
            if (exact >= 32765.0L) CHECK(code == kMaxCode);
            if (exact <= -32765.0L) CHECK(code == -kMaxCode);
          }
        }
      }
    }
  }
}

void TestSpecialValues() {
  const double inf = std::numeric_limits<double>::infinity();
  for (const Isa isa : Isas()) {
    for (const Transform transform : {Transform::kPlain, Transform::kRoot}) {
      CHECK(CodeOf(isa, transform, 0.0) == kZeroCode);
      CHECK(CodeOf(isa, transform, -0.0) == kZeroCode);
      CHECK(CodeOf(isa, transform, -1.0) == kAbsentCode);
      CHECK(CodeOf(isa, transform, -inf) == kAbsentCode);
      CHECK(CodeOf(isa, transform, inf) == kInfCode);
      CHECK(CodeOf(isa, transform, std::nan("")) == kNanCode);
      CHECK(CodeOf(isa, transform, -std::nan("")) == kNanCode);
      CHECK(CodeOf(isa, transform, 5e-324) == -kMaxCode);
      CHECK(CodeOf(isa, transform, std::numeric_limits<double>::max()) == kMaxCode);
    }
  }
}

void TestOtherCodecs() {
  const double inf = std::numeric_limits<double>::infinity();
  const double cells[] = {0.0, -1.0, std::nan(""), inf, 4.0, 1e300, 70000.0, 2.5};
  for (const Isa isa : Isas()) {
    uint32_t floats[8];
    uint16_t shorts[8];
    double back[8];
    Pack(isa, Codec::kF32, Transform::kRoot, cells, 8, floats);
    CHECK(floats[1] == kAbsentFloatBits && floats[2] == 0x7fc00000);
    Unpack(Codec::kF32, floats, 8, back);
    CHECK(back[0] == 0.0 && back[1] == -1.0 && std::isnan(back[2]) && back[3] == inf && back[4] == 2.0);
    Pack(isa, Codec::kU16, Transform::kPlain, cells, 8, shorts);
    const uint16_t expected[] = {0, 0, 0, 65535, 4, 65535, 65535, 3};
    CHECK(std::memcmp(shorts, expected, sizeof(expected)) == 0);
  }
}

void TestCrc() {
  CHECK(Crc32("", 0) == 0);
  CHECK(Crc32("123456789", 9) == 0xcbf43926);  // the check value of CRC-32
  std::vector<uint8_t> bytes(1000);
  std::mt19937 random(1);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (size_t split = 0; split <= 40; ++split) {
    for (size_t size = split; size <= split + 40; ++size) {
      CHECK(Crc32(bytes.data() + split, size - split, Crc32(bytes.data(), split)) == Crc32(bytes.data(), size));
    }
  }
}

void TestQueueHandsOverEveryRowOnce() {
  RowQueue queue(3, kCells);
  constexpr uint64_t kRows = 20000;
  std::thread pusher([&queue] {
    std::vector<double> cells(kCells);
    for (uint64_t step = 0; step < kRows; ++step) {
      cells.assign(kCells, static_cast<double>(step));
      RowRecord record{};
      record.step = step;
      while (!queue.Push(record, cells.data())) std::this_thread::yield();
    }
  });
  for (uint64_t step = 0; step < kRows; ++step) {
    while (queue.size() == 0) std::this_thread::yield();
    const RowQueue::Slot& slot = queue.Front();
    CHECK(slot.record.step == step);
    CHECK(slot.cells.front() == static_cast<double>(step) && slot.cells.back() == static_cast<double>(step));
    queue.Pop();
  }
  pusher.join();
  CHECK(queue.size() == 0);
}

WriterOptions OptionsFor(const std::string& name) {
  WriterOptions options;
  options.store.path = scratch + "/" + name;
  options.store.schema = "{\"model\":\"native\"}";
  options.store.layout = {{Codec::kLog2q8, Transform::kRoot, kCells - 1}, {Codec::kF32, Transform::kPlain, 1}};
  options.store.run_id = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  options.store.sync = SyncMode::kNever;
  return options;
}

bool WriteStep(Writer* writer, uint64_t step) {
  const std::vector<double> cells(kCells, static_cast<double>(step + 1));
  RowRecord record{};
  record.step = step;
  return writer->Write(record, cells.data(), cells.size());
}

// Flushes often enough that the queue never fills, however slow the machine.
void WriteSteps(Writer* writer, uint64_t begin, uint64_t end) {
  for (uint64_t step = begin; step < end; ++step) {
    CHECK(WriteStep(writer, step));
    if (step % 8 == 7) CHECK(writer->Flush(true));
  }
}

// The steps in the main file, after checking that frames, numbers and payloads fit.
std::vector<uint64_t> StepsIn(const std::string& path, uint32_t* resumed = nullptr) {
  FrameFile file;
  file.Open(path, Sink::Mode::kRead, RunId{}, false);
  std::vector<uint64_t> steps;
  std::vector<uint8_t> payload;
  uint64_t number = 0;
  for (const FrameInfo& frame : file.frames()) {
    CHECK(frame.header.frame_number == number++);
    CHECK(file.ReadPayload(frame, &payload));
    if (frame.header.kind != static_cast<uint32_t>(FrameKind::kSteps)) continue;
    CHECK(frame.header.first_row == steps.size());
    for (uint32_t row = 0; row < frame.header.rows; ++row) {
      RowRecord record;
      std::memcpy(&record, payload.data() + row * sizeof(record), sizeof(record));
      if (resumed != nullptr && (record.flags & kRowResumed)) ++*resumed;
      steps.push_back(record.step);
    }
  }
  return steps;
}

std::vector<uint64_t> Range(uint64_t begin, uint64_t end) {
  std::vector<uint64_t> steps;
  for (uint64_t step = begin; step < end; ++step) steps.push_back(step);
  return steps;
}

bool FileExists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

void TestWriterWritesEveryRow() {
  for (const uint64_t rows : {0, 1, 64, 200}) {
    const WriterOptions options = OptionsFor("rows" + std::to_string(rows));
    Writer writer(options);
    WriteSteps(&writer, 0, rows);
    CHECK(writer.WriteEvent("{\"kind\":\"note\",\"step\":1,\"site\":null}"));
    CHECK(writer.WriteTokens(1, std::string(5000, 'x')));
    CHECK(writer.Close());
    CHECK(!WriteStep(&writer, 9) && !writer.Flush(true));
    CHECK(writer.num_accepted() == rows && writer.num_flushed() == rows);
    CHECK(StepsIn(options.store.path) == Range(0, rows));
    CHECK(!FileExists(options.store.path + ".tail"));
  }
}

void TestManyThreadsAtOnce() {
  WriterOptions options = OptionsFor("threads");
  options.flush_seconds = 0.001;
  options.queue_rows = 4;
  std::atomic<uint64_t> accepted{0};
  {
    Writer writer(options);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&writer, &accepted, thread] {
        for (uint64_t step = 0; step < 300; ++step) {
          if (WriteStep(&writer, step)) ++accepted;
          if (step % 50 == 0) {
            writer.WriteEvent("{}");
            writer.Flush(thread % 2 == 0);
          }
          static_cast<void>(writer.error());
          CHECK(writer.num_flushed() <= writer.num_accepted());
        }
      });
    }
    threads.emplace_back([&writer] {
      for (int change = 0; change < 5; ++change) {
        CHECK(writer.ChangeSchema("{\"change\":" + std::to_string(change) + "}",
                                  {{Codec::kLog2q8, Transform::kPlain, kCells}}));
      }
    });
    for (std::thread& thread : threads) thread.join();
    CHECK(writer.num_accepted() == accepted && accepted + writer.num_dropped() == 1200);
    CHECK(writer.error().empty());
  }
  CHECK(StepsIn(options.store.path).size() == accepted);
}

void TestCloseWhileOthersWriteAndFlush() {
  for (int round = 0; round < 20; ++round) {
    const WriterOptions options = OptionsFor("closing" + std::to_string(round));
    Writer writer(options);
    std::thread rows([&writer] {
      for (uint64_t step = 0; step < 500; ++step) WriteStep(&writer, step);
    });
    std::thread flushes([&writer] {
      for (int i = 0; i < 50; ++i) writer.Flush(true);
    });
    std::thread closes([&writer] { writer.Close(); });
    writer.Close();
    for (std::thread* thread : {&rows, &flushes, &closes}) thread->join();
    CHECK(StepsIn(options.store.path).size() == writer.num_accepted());
  }
}

// Leaves the files as a crash would: a child writes, flushes and ends without closing.
void Crash(const WriterOptions& options, uint64_t rows) {
  const pid_t child = fork();
  if (child == 0) {
    Writer writer(options);
    WriteSteps(&writer, 0, rows);
    CHECK(writer.Flush(true));
    CHECK(writer.num_flushed() == rows);
    std::_Exit(0);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

void TestResumeAfterCrash() {
  for (const uint64_t rows : {0, 1, 63, 64, 100}) {
    WriterOptions options = OptionsFor("resume" + std::to_string(rows));
    Crash(options, rows);
    options.store.resume = true;
    {
      Writer writer(options);
      CHECK(writer.first_row() == rows && writer.last_step() == (rows > 0 ? rows - 1 : 0));
      WriteSteps(&writer, rows, rows + 70);
    }
    uint32_t resumed = 0;
    CHECK(StepsIn(options.store.path, &resumed) == Range(0, rows + 70));
    CHECK(resumed == 1);
    CHECK(!FileExists(options.store.path + ".tail"));
  }
}

void TestRefusals() {
  WriterOptions options = OptionsFor("refused");
  Writer first(options);
  for (const bool resume : {false, true}) {
    options.store.resume = resume;
    try {
      Writer second(options);
      CHECK(false);
    } catch (const FileError& error) {
      CHECK(error.code() == (resume ? EWOULDBLOCK : EEXIST));
    }
  }
  options = OptionsFor("no/such/directory");
  try {
    Writer second(options);
    CHECK(false);
  } catch (const FileError& error) {
    CHECK(error.code() == ENOENT);
  }
  CHECK(WriteStep(&first, 1));
  try {
    first.Write(RowRecord{}, nullptr, 3);
    CHECK(false);
  } catch (const std::invalid_argument&) {
  }
}

// With the default action of SIGXFSZ, which would end the process.
void TestFileSizeLimit() {
  const WriterOptions options = OptionsFor("limit");
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{40000, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    Writer writer(options);
    uint64_t flushed = 0;
    for (uint64_t step = 0; writer.error().empty(); ++step) {
      WriteStep(&writer, step);
      if (writer.Flush(true)) flushed = writer.num_flushed();
      CHECK(step < 10000);
    }
    CHECK(writer.error().find("File too large") != std::string::npos);
    CHECK(!WriteStep(&writer, 0) && !writer.Close());
    std::_Exit(flushed > 64 && flushed < 256 ? static_cast<int>(flushed) : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
  const auto flushed = static_cast<uint64_t>(WEXITSTATUS(status));
  CHECK(flushed > 64);
  WriterOptions again = options;
  again.store.resume = true;
  CHECK(Writer(again).first_row() >= flushed);
  CHECK(StepsIn(options.store.path).size() >= flushed);
}

void TestDeletedFileTurnsTheWriterOff() {
  const WriterOptions options = OptionsFor("deleted");
  Writer writer(options);
  CHECK(WriteStep(&writer, 1));
  CHECK(unlink(options.store.path.c_str()) == 0);
  CHECK(!writer.Flush(true));
  CHECK(writer.error().find("deleted") != std::string::npos);
  CHECK(!WriteStep(&writer, 2) && !writer.WriteEvent("{}"));
}

void TestChildOfAForkDoesNothing() {
  const WriterOptions options = OptionsFor("fork");
  auto writer = std::make_unique<Writer>(options);
  CHECK(WriteStep(writer.get(), 0));
  const pid_t child = fork();
  if (child == 0) {
    CHECK(!WriteStep(writer.get(), 1) && !writer->Flush(true) && !writer->WriteEvent("{}") && !writer->Close());
    CHECK(writer->error().empty());
    writer.reset();
    std::_Exit(0);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(WriteStep(writer.get(), 1) && writer->Close());
  CHECK(StepsIn(options.store.path) == Range(0, 2));
}

void TestTornFrameDoesNotSwallowWhatFollows() {
  WriterOptions options = OptionsFor("torn");
  {
    Writer writer(options);
    WriteSteps(&writer, 0, 128);
  }
  uint64_t cut = 0;
  {
    FrameFile file;
    file.Open(options.store.path, Sink::Mode::kRead, RunId{}, false);
    cut = file.frames()[2].offset + 200;  // inside the second steps frame, its header whole
  }
  CHECK(truncate(options.store.path.c_str(), static_cast<off_t>(cut)) == 0);
  options.store.resume = true;
  {
    Writer writer(options);
    WriteSteps(&writer, 64, 400);
  }
  CHECK(StepsIn(options.store.path) == Range(0, 400));
}

}  // namespace
}  // namespace pyscan

int main(int argc, char** argv) {
  CHECK(argc == 2);
  pyscan::scratch = argv[1];
  const struct {
    const char* promise;
    void (*test)();
  } tests[] = {
      {"the code of every double is exact and monotone", pyscan::TestCodeOfEveryDouble},
      {"special values keep their meaning", pyscan::TestSpecialValues},
      {"f32 and u16 keep values", pyscan::TestOtherCodecs},
      {"crc32 is that of zlib and can be continued", pyscan::TestCrc},
      {"the queue hands over every row once", pyscan::TestQueueHandsOverEveryRowOnce},
      {"the writer writes every row", pyscan::TestWriterWritesEveryRow},
      {"many threads may write, flush and change the schema", pyscan::TestManyThreadsAtOnce},
      {"closing is safe while others write and flush", pyscan::TestCloseWhileOthersWriteAndFlush},
      {"a resume after a crash keeps every flushed row", pyscan::TestResumeAfterCrash},
      {"files in use, existing files and bad rows are refused", pyscan::TestRefusals},
      {"a file size limit is an error, not a signal", pyscan::TestFileSizeLimit},
      {"a deleted file turns the writer off", pyscan::TestDeletedFileTurnsTheWriterOff},
      {"the child of a fork does nothing", pyscan::TestChildOfAForkDoesNothing},
      {"a torn frame does not swallow what follows", pyscan::TestTornFrameDoesNotSwallowWhatFollows},
  };
  for (const auto& [promise, test] : tests) {
    test();
    std::printf("ok: %s\n", promise);
    std::fflush(stdout);
  }
  return 0;
}
