// The writer as the training thread sees it: rows are copied into a queue, a thread of the writer's own packs them and
// writes them to disk (store.h). No failure of the disk reaches the caller as an exception: the first one is kept as
// text and turns the writer off. In a child of a fork every call does nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "format.h"
#include "store.h"

namespace pyscan {

struct WriterOptions {
  StoreOptions store;
  double flush_seconds = 2.0;
  // Rows that may wait. Not given: 16, or as many as fit into 1 MiB if that is more.
  std::optional<size_t> queue_rows;
};

class Writer {
 public:
  // Opens the files on the writer thread and waits for that. Throws FileError or std::invalid_argument.
  explicit Writer(const WriterOptions& options);
  // Closes, unless in a child of a fork.
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  enum class Handover { kAccepted, kOff, kBusy };

  // Copies the row into the queue without ever waiting. kBusy: no slot is free, or another thread is handing over.
  // Throws std::invalid_argument if num_cells is not that of the layout.
  Handover TryWrite(const RowRecord& record, const double* cells, uint64_t num_cells);

  // The same, but waits up to 20 ms for a free slot, then drops the row and counts it. A row that comes while the
  // queue has not moved since the last drop is dropped at once: a stuck disk costs the training 20 ms, not 20 ms a
  // step. True if the row was accepted.
  bool Write(const RowRecord& record, const double* cells, uint64_t num_cells);

  // One JSON object without a newline. False if the writer is off or 64 MiB of events and tokens wait to be written.
  bool WriteEvent(std::string json);
  // The payload of a tokens frame: `bytes`, then each array of sums of squares as log2q8 codes of its root, padded with
  // zeros to a multiple of 64. They are packed on the writer thread.
  bool WriteTokens(uint64_t step, std::string bytes, std::vector<std::vector<double>> arrays = {});

  // The rows so far are closed as a short frame; returns when the new schema is in the file, false if the writer is
  // off.
  bool ChangeSchema(const std::string& schema, const Layout& layout);

  // Asks for a flush; with `wait`, returns when everything accepted before is in a file. False if the writer is off.
  bool Flush(bool wait);

  // Writes what is left and the index; further calls do nothing. False if the writer had turned itself off.
  bool Close();

  // Rows of this writer, not of the whole file.
  uint64_t num_accepted() const;
  uint64_t num_flushed() const;  // in the main file or in the tail: a kill does not lose them
  uint64_t num_dropped() const;
  uint64_t first_row() const;  // number in the file of the first row of this writer
  uint64_t last_step() const;  // of the newest row the file held when it was opened; 0: none
  const RunId& run_id() const;
  // Text of the first error; empty while there is none.
  std::string error() const;

 private:
  class Core;
  bool in_child() const;

  std::unique_ptr<Core> core_;
  const int num_forks_;  // at construction
};

}  // namespace pyscan
