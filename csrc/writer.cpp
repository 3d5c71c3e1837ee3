#include "writer.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "pack.h"
#include "queue.h"

namespace pyscan {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLongestWait = std::chrono::milliseconds(20);
constexpr uint64_t kQueueBytes = uint64_t{64} << 20;  // wide rows get fewer slots, but never less than 2
// Waking the writer thread takes a core away from the training: small rows wait for its tick.
constexpr uint64_t kUsualRows = 16, kUsualBytes = uint64_t{1} << 20;
constexpr uint64_t kMessageBytes = uint64_t{64} << 20;  // events and tokens waiting
constexpr uint64_t kWakeBytes = uint64_t{8} << 20;      // of them, reason enough to wake the writer thread
constexpr size_t kDroppedSteps = 1000;                  // steps a dropped_rows event names; its count is complete

// Blocks every signal in this thread for its lifetime. A thread started meanwhile inherits that: the signals of the
// host are never delivered to it, and a file size limit is the error EFBIG instead of a deadly SIGXFSZ.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

struct Message {
  FrameKind kind;
  uint64_t step;
  std::string bytes;
  std::vector<std::vector<double>> arrays = {};  // of tokens, still to be packed

  uint64_t num_bytes() const {
    uint64_t total = bytes.size();
    for (const std::vector<double>& array : arrays) total += array.size() * sizeof(double);
    return total;
  }
};

// The payload of a message, its arrays packed.
std::string Payload(Message message) {
  std::string payload = std::move(message.bytes);
  for (const std::vector<double>& array : message.arrays) {
    const size_t begin = payload.size();
    payload.resize(begin + (array.size() * CodecBytes(Codec::kLog2q8) + 63) / 64 * 64);
    Pack(ActiveIsa(), Codec::kLog2q8, Transform::kRoot, array.data(), array.size(), &payload[begin]);
  }
  return payload;
}

std::unique_ptr<RowQueue> MakeQueue(std::optional<size_t> queue_rows, const Layout& layout) {
  const uint64_t num_cells = NumCells(layout);
  const uint64_t row_bytes = num_cells * sizeof(double) + sizeof(RowRecord);
  const uint64_t wanted = queue_rows.value_or(std::max(kUsualRows, kUsualBytes / row_bytes));
  return std::make_unique<RowQueue>(std::max<uint64_t>(2, std::min(wanted, kQueueBytes / row_bytes)), num_cells);
}

std::string DroppedRowsEvent(uint64_t count, const std::vector<uint64_t>& steps) {
  std::string json = "{\"kind\": \"dropped_rows\", \"step\": " + std::to_string(steps.front()) +
                     ", \"site\": null, \"count\": " + std::to_string(count) + ", \"steps\": [";
  for (size_t i = 0; i < steps.size(); ++i) json += (i > 0 ? ", " : "") + std::to_string(steps[i]);
  return json + "]}";
}

}  // namespace

// The shared state and the writer thread. Lives on the heap so that the child of a fork, where the thread does not
// exist and the mutexes may be locked for ever, can abandon it.
class Writer::Core {
 public:
  explicit Core(const WriterOptions& options);
  ~Core() { Close(); }

  Handover TryWrite(const RowRecord& record, const double* cells, uint64_t num_cells);
  bool Write(const RowRecord& record, const double* cells, uint64_t num_cells);
  bool Send(Message message);
  bool ChangeSchema(const std::string& schema, const Layout& layout);
  bool Flush(bool wait);
  bool Close();

  std::atomic<bool> off{false};  // closed, or turned off by an error
  std::atomic<uint64_t> num_accepted{0};
  std::atomic<uint64_t> num_flushed{0};
  std::atomic<uint64_t> num_dropped{0};
  // Set before the constructor returns, constant afterwards.
  uint64_t first_row = 0;
  uint64_t last_step = 0;
  RunId run_id{};

  std::string error() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

 private:
  struct SchemaChange {
    const std::string& schema;
    const Layout& layout;
    std::unique_ptr<RowQueue> queue;  // for rows of the new layout
  };

  void Run(const WriterOptions& options);
  void Open(const WriterOptions& options);
  bool Turn(Clock::time_point* deadline);
  void Work(bool flush, const SchemaChange* change, bool closing);
  void DrainRows();
  void WriteMessages();
  void TurnOff(const std::string& text);
  bool Push(const RowRecord& record, const double* cells, uint64_t num_cells);
  void Drop(const RowRecord& record);

  const std::optional<size_t> queue_rows_;
  const Clock::duration flush_interval_;

  // Held by the one caller that hands over rows, changes the schema or closes. Taken before mutex_.
  std::mutex producer_mutex_;
  bool stalled_ = false;  // guarded by producer_mutex_: the last row was dropped

  // Replaced by the writer thread, holding mutex_, while ChangeSchema holds producer_mutex_: so either mutex is enough
  // to use the pointer.
  std::unique_ptr<RowQueue> queue_;

  std::mutex mutex_;                  // guards everything below
  std::condition_variable wake_;      // for the writer thread: something to do before the next tick
  std::condition_variable progress_;  // from the writer thread: a slot, a flush or a change of schema is done
  bool opened_ = false;
  std::exception_ptr open_error_;
  bool closing_ = false;
  uint64_t flushes_wanted_ = 0;
  uint64_t flushes_done_ = 0;
  SchemaChange* change_ = nullptr;
  std::vector<Message> messages_;
  uint64_t message_bytes_ = 0;
  uint64_t num_dropped_since_event_ = 0;
  std::vector<uint64_t> dropped_steps_;
  std::string error_;

  std::unique_ptr<Store> store_;  // of the writer thread
  std::thread thread_;            // guarded by producer_mutex_
};

Writer::Core::Core(const WriterOptions& options)
    : queue_rows_(options.queue_rows),
      flush_interval_(std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(std::min(options.flush_seconds, 1e8)))),
      queue_(MakeQueue(options.queue_rows, options.store.layout)) {
  {
    const SignalsBlocked blocked;
    thread_ = std::thread([this, &options] { Run(options); });
  }
  std::unique_lock<std::mutex> lock(mutex_);
  progress_.wait(lock, [this] { return opened_; });
  if (open_error_ == nullptr) return;
  lock.unlock();
  thread_.join();
  std::rethrow_exception(open_error_);
}

void Writer::Core::Run(const WriterOptions& options) {
  pthread_setname_np(pthread_self(), "pyscan-writer");
  Open(options);
  // `options` belongs to the constructor, which may have returned by now.
  if (open_error_ != nullptr) return;
  Clock::time_point deadline = Clock::now() + flush_interval_;
  while (Turn(&deadline)) {
  }
}

void Writer::Core::Open(const WriterOptions& options) {
  std::exception_ptr error;
  try {
    store_ = std::make_unique<Store>(options.store);
    first_row = store_->first_row();
    last_step = store_->last_step();
    run_id = store_->run_id();
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  open_error_ = error;
  opened_ = true;
  progress_.notify_all();
}

// Waits for the tick or a request and serves it. False when the writer has been closed.
bool Writer::Core::Turn(Clock::time_point* deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_until(lock, *deadline, [this] {
    return closing_ || change_ != nullptr || flushes_wanted_ > flushes_done_ || message_bytes_ >= kWakeBytes ||
           queue_->size() >= queue_->wake_size();
  });
  const bool closing = closing_;
  SchemaChange* const change = change_;
  const uint64_t flushes = flushes_wanted_;
  const bool flush = closing || change != nullptr || flushes > flushes_done_ || message_bytes_ >= kWakeBytes ||
                     Clock::now() >= *deadline;
  lock.unlock();
  try {
    Work(flush, change, closing);
  } catch (const FileError& error) {
    TurnOff(error.path() + ": " + error.what());
  } catch (const std::exception& error) {
    TurnOff(error.what());
  }
  if (flush) *deadline = Clock::now() + flush_interval_;
  lock.lock();
  flushes_done_ = closing ? flushes_wanted_ : flushes;  // nobody may wait for a thread that ends
  if (change != nullptr) {
    queue_ = std::move(change->queue);
    change_ = nullptr;
  }
  progress_.notify_all();
  return !closing;
}

void Writer::Core::Work(bool flush, const SchemaChange* change, bool closing) {
  DrainRows();
  if (off || !flush) return;
  if (closing) off = true;  // from here on nothing is accepted that would not be written
  if (!store_->awaits_resumed_row() || change != nullptr || closing) WriteMessages();
  if (change != nullptr) store_->ChangeSchema(change->schema, change->layout);
  if (closing) {
    store_->Close();
  } else {
    store_->Flush();
  }
  num_flushed = store_->num_flushed();
}

// Takes the rows that are in the queue now, not those that come meanwhile: a tick is never starved by a fast producer.
void Writer::Core::DrainRows() {
  for (size_t left = queue_->size(); left > 0; --left) {
    if (!off) {
      const RowQueue::Slot& slot = queue_->Front();
      store_->AddRow(slot.record, slot.cells.data());
      num_flushed = store_->num_flushed();
    }
    queue_->Pop();
    const std::lock_guard<std::mutex> lock(mutex_);
    progress_.notify_all();
  }
}

void Writer::Core::WriteMessages() {
  std::vector<Message> messages;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    messages.swap(messages_);
    message_bytes_ = 0;
    if (num_dropped_since_event_ > 0) {
      messages.push_back({FrameKind::kEvents, 0, DroppedRowsEvent(num_dropped_since_event_, dropped_steps_)});
      num_dropped_since_event_ = 0;
      dropped_steps_.clear();
    }
  }
  std::string lines;
  uint32_t num_lines = 0;
  for (Message& message : messages) {
    if (message.kind == FrameKind::kTokens) {
      const uint64_t step = message.step;
      store_->WriteTokens(step, Payload(std::move(message)));
    } else {
      lines += message.bytes + "\n";
      ++num_lines;
    }
  }
  if (num_lines > 0) store_->WriteEvents(lines, num_lines);
}

void Writer::Core::TurnOff(const std::string& text) {
  off = true;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_.empty()) error_ = text;
  messages_.clear();
}

// Needs producer_mutex_. False if the queue is full.
bool Writer::Core::Push(const RowRecord& record, const double* cells, uint64_t num_cells) {
  if (num_cells != queue_->num_cells()) {
    throw std::invalid_argument("cells must hold " + std::to_string(queue_->num_cells()) +
                                " values as the layout says, got " + std::to_string(num_cells));
  }
  if (!queue_->Push(record, cells)) return false;
  num_accepted.fetch_add(1, std::memory_order_relaxed);
  stalled_ = false;
  // The writer thread is woken once per half queue, not for each row; the rest waits for its tick.
  if (queue_->size() == queue_->wake_size()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_one();
  }
  return true;
}

Writer::Handover Writer::Core::TryWrite(const RowRecord& record, const double* cells, uint64_t num_cells) {
  if (off.load(std::memory_order_relaxed)) return Handover::kOff;
  const std::unique_lock<std::mutex> producer(producer_mutex_, std::try_to_lock);
  if (!producer.owns_lock()) return Handover::kBusy;
  return Push(record, cells, num_cells) ? Handover::kAccepted : Handover::kBusy;
}

bool Writer::Core::Write(const RowRecord& record, const double* cells, uint64_t num_cells) {
  const std::lock_guard<std::mutex> producer(producer_mutex_);
  if (off) return false;
  if (Push(record, cells, num_cells)) return true;
  if (!stalled_) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.notify_one();
    progress_.wait_for(lock, kLongestWait, [this] { return !queue_->full() || off; });
  }
  if (off) return false;
  if (Push(record, cells, num_cells)) return true;
  Drop(record);
  return false;
}

void Writer::Core::Drop(const RowRecord& record) {
  stalled_ = true;
  num_dropped.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_dropped_since_event_;
  if (dropped_steps_.size() < kDroppedSteps) dropped_steps_.push_back(record.step);
}

bool Writer::Core::Send(Message message) {
  const uint64_t num_bytes = message.num_bytes();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (off || message_bytes_ + num_bytes > kMessageBytes) return false;
  message_bytes_ += num_bytes;
  messages_.push_back(std::move(message));
  if (message_bytes_ >= kWakeBytes) wake_.notify_one();
  return true;
}

bool Writer::Core::ChangeSchema(const std::string& schema, const Layout& layout) {
  const std::lock_guard<std::mutex> producer(producer_mutex_);
  if (off) return false;
  SchemaChange change{schema, layout, MakeQueue(queue_rows_, layout)};
  std::unique_lock<std::mutex> lock(mutex_);
  change_ = &change;
  wake_.notify_one();
  progress_.wait(lock, [this] { return change_ == nullptr; });
  return !off;
}

bool Writer::Core::Flush(bool wait) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (off) return false;
  const uint64_t number = ++flushes_wanted_;
  wake_.notify_one();
  if (wait) progress_.wait(lock, [this, number] { return flushes_done_ >= number; });
  return !off;
}

bool Writer::Core::Close() {
  const std::lock_guard<std::mutex> producer(producer_mutex_);
  if (!thread_.joinable()) return error().empty();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    wake_.notify_one();
  }
  thread_.join();
  store_.reset();
  return error().empty();
}

Writer::Writer(const WriterOptions& options) : num_forks_(NumForks()) {
  if (!(options.flush_seconds > 0)) {
    throw std::invalid_argument("flush_seconds must be > 0, got " + std::to_string(options.flush_seconds));
  }
  if (options.queue_rows && *options.queue_rows < 2) {
    throw std::invalid_argument("queue_rows must be >= 2, got " + std::to_string(*options.queue_rows));
  }
  core_ = std::make_unique<Core>(options);
}

Writer::~Writer() {
  if (in_child()) static_cast<void>(core_.release());
}

bool Writer::in_child() const { return NumForks() != num_forks_; }

Writer::Handover Writer::TryWrite(const RowRecord& record, const double* cells, uint64_t num_cells) {
  return in_child() ? Handover::kOff : core_->TryWrite(record, cells, num_cells);
}

bool Writer::Write(const RowRecord& record, const double* cells, uint64_t num_cells) {
  return !in_child() && core_->Write(record, cells, num_cells);
}

bool Writer::WriteEvent(std::string json) {
  return !in_child() && core_->Send({FrameKind::kEvents, 0, std::move(json)});
}

bool Writer::WriteTokens(uint64_t step, std::string bytes, std::vector<std::vector<double>> arrays) {
  return !in_child() && core_->Send({FrameKind::kTokens, step, std::move(bytes), std::move(arrays)});
}

bool Writer::ChangeSchema(const std::string& schema, const Layout& layout) {
  return !in_child() && core_->ChangeSchema(schema, layout);
}

bool Writer::Flush(bool wait) { return !in_child() && core_->Flush(wait); }
bool Writer::Close() { return !in_child() && core_->Close(); }
uint64_t Writer::num_accepted() const { return core_->num_accepted; }
uint64_t Writer::num_flushed() const { return core_->num_flushed; }
uint64_t Writer::num_dropped() const { return core_->num_dropped; }
uint64_t Writer::first_row() const { return core_->first_row; }
uint64_t Writer::last_step() const { return core_->last_step; }
const RunId& Writer::run_id() const { return core_->run_id; }
std::string Writer::error() const { return in_child() ? "" : core_->error(); }

}  // namespace pyscan
