// The two files of a scan, run.mscan and run.mscan.tail, and what goes into which: full frames of 64 rows, events,
// tokens, schemas and the index into the first, rows that do not fill a frame yet into the second. Belongs to the
// writer thread, which alone may call it; after an exception nothing may be called but the destructor, which leaves
// both files as they are.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "frame.h"
#include "sink.h"
#include "steps.h"

namespace pyscan {

// When the system is asked to bring the bytes to the disk itself. Without, a killed process loses nothing, a machine
// without power may.
enum class SyncMode { kNever, kClose, kFlush };

struct StoreOptions {
  std::string path;
  std::string schema;  // JSON
  Layout layout;       // of the schema
  RunId run_id{};      // of a new file; a continued one keeps its own
  SyncMode sync = SyncMode::kClose;
  bool resume = false;
  Layout previous_layout;  // of the last schema of the file to be continued, for rows left in its tail
};

class Store {
 public:
  // Creates or continues the file. Throws FileError or std::invalid_argument.
  explicit Store(const StoreOptions& options);

  // Adds a row; the 64th goes to the main file with the 63 before it.
  void AddRow(RowRecord record, const double* cells);
  // `lines` holds `num_lines` JSON objects, each ended by a newline.
  void WriteEvents(const std::string& lines, uint32_t num_lines);
  void WriteTokens(uint64_t step, const std::string& payload);
  // Puts the rows that are in no file yet into the tail.
  void Flush();
  // Closes the frame of the rows so far; `layout` holds for the rows to come.
  void ChangeSchema(const std::string& schema, const Layout& layout);
  // Writes the last rows and the index, removes the tail.
  void Close();

  // True from a resume to the first row after it. Events written meanwhile would count as part of the timeline which
  // that row voids, so the writer holds them back.
  bool awaits_resumed_row() const { return resumed_; }
  const RunId& run_id() const { return main_.run_id(); }
  uint64_t first_row() const { return first_row_; }             // number of the first row of this writer
  uint64_t num_rows() const { return next_row_ - first_row_; }  // rows added
  uint64_t num_flushed() const { return num_flushed_; }         // of these, in a file
  uint64_t last_step() const { return last_step_; }

 private:
  void Continue(const StoreOptions& options);
  void RecoverTail(const Layout& layout);
  void OpenTail();
  void ClearTail();
  void WriteRows(StepsBlock* block, uint64_t first_row);
  void CloseRows();
  void WriteBytes(FrameKind kind, uint64_t first_step, uint32_t rows, const std::string& payload);
  void WriteIndex();
  FrameHeader HeaderOf(FrameKind kind) const;

  const std::string tail_path_;
  const SyncMode sync_;
  FrameFile main_;
  FrameFile tail_;      // open from the first row that goes there
  FrameBuffer buffer_;  // of the frame being written
  std::unique_ptr<StepsBlock> block_;
  uint32_t rows_in_tail_ = 0;  // the first so many rows of block_ are in the tail
  uint64_t first_row_ = 0;
  uint64_t next_row_ = 0;
  uint64_t num_flushed_ = 0;
  uint64_t last_step_ = 0;  // of the newest row, 0 before the first
  bool resumed_ = false;
};

// The schema that a resume would meet; empty if the file does not exist or holds no frame and will be begun anew.
std::string ReadLastSchema(const std::string& path);

}  // namespace pyscan
