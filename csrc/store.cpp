#include "store.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

namespace pyscan {
namespace {

std::string TailPath(const std::string& path) { return path + ".tail"; }

// The schema that governs the rows to come.
std::string LastSchema(const FrameFile& file) {
  for (auto frame = file.frames().rbegin(); frame != file.frames().rend(); ++frame) {
    if (frame->header.kind != static_cast<uint32_t>(FrameKind::kSchema)) continue;
    std::vector<uint8_t> payload;
    if (!file.ReadPayload(*frame, &payload)) break;
    return std::string(payload.begin(), payload.end());
  }
  throw std::invalid_argument("the last schema of " + file.sink().path() + " is damaged; choose another path");
}

// The step of the last row of a steps frame. A damaged frame says at least where it began.
uint64_t LastStepOf(const FrameFile& file, const FrameInfo& frame) {
  std::vector<uint8_t> payload;
  const uint32_t rows = frame.header.rows;
  if (rows == 0 || !file.ReadPayload(frame, &payload) || payload.size() / sizeof(RowRecord) < rows) {
    return frame.header.first_step;
  }
  RowRecord record;
  std::memcpy(&record, payload.data() + (rows - 1) * sizeof(record), sizeof(record));
  return record.step;
}

uint64_t LastStep(const FrameFile& file) {
  for (auto frame = file.frames().rbegin(); frame != file.frames().rend(); ++frame) {
    if (frame->header.kind == static_cast<uint32_t>(FrameKind::kSteps)) return LastStepOf(file, *frame);
  }
  return 0;
}

bool Exists(const std::string& path) {
  Sink sink;
  try {
    sink.Open(path, Sink::Mode::kRead);
  } catch (const FileError& error) {
    if (error.code() == ENOENT) return false;
    throw;
  }
  return true;
}

// Opens the tail for reading; false if there is none of this run. A tail of another run is worth nothing here.
bool OpenTailOf(const std::string& path, const RunId& run_id, FrameFile* tail) {
  if (!Exists(TailPath(path))) return false;
  try {
    tail->Open(TailPath(path), Sink::Mode::kRead, run_id, false);
  } catch (const std::invalid_argument&) {
    return false;
  }
  return tail->run_id() == run_id;
}

}  // namespace

Store::Store(const StoreOptions& options) : tail_path_(TailPath(options.path)), sync_(options.sync) {
  const bool existed = Exists(options.path);
  try {
    main_.Open(options.path, options.resume ? Sink::Mode::kResume : Sink::Mode::kCreate, options.run_id, true);
    if (main_.frames().empty()) {
      RemoveFile(tail_path_);  // of a scan that is gone
      WriteBytes(FrameKind::kSchema, 0, 0, options.schema);
    } else {
      Continue(options);
    }
    block_ = std::make_unique<StepsBlock>(options.layout);
  } catch (...) {
    if (!existed && main_.sink().is_open()) RemoveFile(options.path);  // it would be in the way of the next attempt
    throw;
  }
}

void Store::Continue(const StoreOptions& options) {
  for (const FrameInfo& frame : main_.frames()) {
    if (frame.header.kind != static_cast<uint32_t>(FrameKind::kSteps)) continue;
    next_row_ = std::max(next_row_, frame.header.first_row + frame.header.rows);
  }
  last_step_ = LastStep(main_);
  const std::string schema = LastSchema(main_);
  RecoverTail(schema == options.schema ? options.layout : options.previous_layout);
  // Other frames may speak of rows that were lost; their numbers are not given again.
  for (const FrameInfo& frame : main_.frames()) next_row_ = std::max(next_row_, frame.header.first_row);
  if (schema != options.schema) WriteBytes(FrameKind::kSchema, last_step_, 0, options.schema);
  first_row_ = next_row_;
  resumed_ = true;
}

// Brings the rows of the tail that the main file does not have into the main file. The tail is emptied afterwards, so
// a crash in between leaves rows in both files, never in none.
void Store::RecoverTail(const Layout& layout) {
  FrameFile tail;
  if (!OpenTailOf(main_.sink().path(), main_.run_id(), &tail)) return;
  StepsBlock block(layout);
  std::vector<uint8_t> payload;
  uint64_t block_row = next_row_;  // number of the first row of the block
  for (const FrameInfo& frame : tail.frames()) {
    const FrameHeader& header = frame.header;
    if (header.kind != static_cast<uint32_t>(FrameKind::kSteps)) continue;
    if (!tail.ReadPayload(frame, &payload)) continue;
    if (payload.size() != StepsPayloadBytes(layout, header.rows)) {
      throw std::invalid_argument("the rows in " + tail.sink().path() +
                                  " do not have the layout of the last schema; remove the file to lose them");
    }
    for (uint32_t row = 0; row < header.rows; ++row) {
      const uint64_t number = header.first_row + row;
      if (number < next_row_) continue;
      if (block.rows() > 0 && (block.full() || number > next_row_)) WriteRows(&block, block_row);
      if (block.rows() == 0) block_row = number;
      block.AddFromRowMajor(payload.data(), header.rows, row);
      last_step_ = block.record(block.rows() - 1).step;
      next_row_ = number + 1;
    }
  }
  if (block.rows() > 0) WriteRows(&block, block_row);
  if (sync_ != SyncMode::kNever) main_.sink().Sync();
  tail.sink().Close();
  RemoveFile(tail_path_);
}

FrameHeader Store::HeaderOf(FrameKind kind) const {
  FrameHeader header{};
  header.kind = static_cast<uint32_t>(kind);
  header.first_step = last_step_;
  header.first_row = next_row_;
  header.frame_number = main_.frames().empty() ? 0 : main_.frames().back().header.frame_number + 1;
  return header;
}

void Store::WriteBytes(FrameKind kind, uint64_t first_step, uint32_t rows, const std::string& payload) {
  FrameHeader header = HeaderOf(kind);
  header.first_step = first_step;
  header.rows = rows;
  std::memcpy(buffer_.Start(payload.size()), payload.data(), payload.size());
  main_.Append(buffer_, header);
}

// Writes the rows of the block to the main file and empties it.
void Store::WriteRows(StepsBlock* block, uint64_t first_row) {
  FrameHeader header = HeaderOf(FrameKind::kSteps);
  header.first_step = block->record(0).step;
  header.first_row = first_row;
  header.rows = block->rows();
  block->BuildColumnMajor(&buffer_);
  main_.Append(buffer_, header);
  block->Clear();
}

void Store::AddRow(RowRecord record, const double* cells) {
  if (resumed_) record.flags |= kRowResumed;
  resumed_ = false;
  block_->Add(record, cells);
  last_step_ = record.step;
  ++next_row_;
  if (block_->full()) CloseRows();
}

void Store::CloseRows() {
  if (block_->rows() == 0) return;
  main_.sink().CheckLinked();
  WriteRows(block_.get(), next_row_ - block_->rows());
  if (sync_ == SyncMode::kFlush) main_.sink().Sync();
  num_flushed_ = num_rows();
  ClearTail();
}

// Only after the rows are in the main file: until then the tail has the only copy.
void Store::ClearTail() {
  if (rows_in_tail_ > 0) tail_.Clear();
  rows_in_tail_ = 0;
}

void Store::WriteEvents(const std::string& lines, uint32_t num_lines) {
  WriteBytes(FrameKind::kEvents, last_step_, num_lines, lines);
}

void Store::WriteTokens(uint64_t step, const std::string& payload) { WriteBytes(FrameKind::kTokens, step, 0, payload); }

void Store::OpenTail() {
  if (!tail_.sink().is_open()) tail_.Open(tail_path_, Sink::Mode::kReplace, main_.run_id(), false);
}

void Store::Flush() {
  main_.sink().CheckLinked();
  if (block_->rows() > rows_in_tail_) {
    OpenTail();
    FrameHeader header = HeaderOf(FrameKind::kSteps);
    header.first_step = block_->record(rows_in_tail_).step;
    header.first_row = next_row_ - block_->rows() + rows_in_tail_;
    header.rows = block_->rows() - rows_in_tail_;
    header.flags = kFrameRowMajor;
    header.frame_number = tail_.frames().size();
    block_->BuildRowMajor(rows_in_tail_, &buffer_);
    tail_.Append(buffer_, header);
    rows_in_tail_ = block_->rows();
    if (sync_ == SyncMode::kFlush) tail_.sink().Sync();
  }
  if (sync_ == SyncMode::kFlush) main_.sink().Sync();
  num_flushed_ = num_rows();
}

void Store::ChangeSchema(const std::string& schema, const Layout& layout) {
  CloseRows();
  WriteBytes(FrameKind::kSchema, last_step_, 0, schema);
  block_ = std::make_unique<StepsBlock>(layout);
}

void Store::WriteIndex() {
  const FrameHeader header = HeaderOf(FrameKind::kIndex);
  const std::vector<FrameInfo>& frames = main_.frames();
  const uint64_t payload_bytes = Pad64(frames.size() * sizeof(IndexEntry) + sizeof(IndexEnd));
  uint8_t* out = buffer_.Start(payload_bytes);
  for (const FrameInfo& frame : frames) {
    const FrameHeader& h = frame.header;
    const IndexEntry entry{frame.offset, h.kind, h.rows, h.first_step, h.first_row, h.payload_bytes, h.frame_number};
    std::memcpy(out, &entry, sizeof(entry));
    out += sizeof(entry);
  }
  IndexEnd end{main_.end(), {}};
  std::memcpy(end.magic, kIndexMagic, sizeof(end.magic));
  std::memcpy(buffer_.payload() + payload_bytes - sizeof(end), &end, sizeof(end));
  main_.Append(buffer_, header);
}

void Store::Close() {
  CloseRows();
  main_.sink().CheckLinked();
  WriteIndex();
  if (sync_ != SyncMode::kNever) {
    main_.sink().Sync();
    SyncDirectoryOf(main_.sink().path());
  }
  tail_.sink().Close();
  RemoveFile(tail_path_);
  main_.sink().Close();
}

std::string ReadLastSchema(const std::string& path) {
  if (!Exists(path)) return "";
  FrameFile main;
  main.Open(path, Sink::Mode::kRead, RunId{}, false);
  return main.frames().empty() ? "" : LastSchema(main);
}

}  // namespace pyscan
