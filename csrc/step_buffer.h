// One step's row of cells, and where each observation goes in it.
//
// A slot is what one observation of one site fills: a cell of sums of squares per block, one of maxima and one of
// non-finite counts. A row is laid out by the caller, who says for every slot where its cells are.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "reduce.h"

namespace pyscan {

// What an absent cell holds: no sum of squares, maximum or count is negative.
constexpr double kAbsent = -1.0;

struct Slot {
  Blocks blocks;
  int64_t num_blocks;
  int64_t sumsq_cell;   // first of num_blocks
  int64_t absmax_cell;  // negative: not kept
  int64_t bad_cell;     // negative: not kept
  bool is_gradient;     // scaled with the loss
};

class StepBuffer {
 public:
  // Throws std::invalid_argument if a slot's cells lie outside the row.
  StepBuffer(int64_t num_cells, std::vector<Slot> slots);

  int64_t num_slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t num_cells() const { return num_cells_; }

  // The functions below throw std::invalid_argument if the matrix has another number of blocks than the slot. They may
  // be called from several threads; the matrix is read without a lock.

  // Adds a matrix to a slot. With `row_sums`, the same read also gives the sum of squares of each row, as RowSums does.
  void Add(int64_t slot, const Matrix& x, int num_threads, double* row_sums = nullptr);
  // Adds what the last Add of this thread found, in whichever buffer, to a slot with the same blocks: the same input
  // met another weight.
  void Repeat(int64_t slot);
  // Puts a matrix in the place of what the slot holds: a gradient is read again when it has changed.
  void Set(int64_t slot, const Matrix& x, int num_threads);
  // Set for many matrices, each on one thread.
  struct Item {
    int64_t slot;
    Matrix x;
  };
  void SetMany(const std::vector<Item>& items, int num_threads);
  // Row ranges of one matrix, one per slot: range i ends before row ends[i] and begins where the one before it ended.
  // An empty range leaves its slot as it is.
  void AddRanges(int64_t first_slot, const Matrix& x, const int32_t* ends, int64_t num_ranges, int num_threads);

  // Writes the finished row to `row`: absent slots as kAbsent, the sum of a block with non-finite values as NaN,
  // gradients divided by `grad_scale`. Then forgets every slot.
  void Take(double grad_scale, double* row);

 private:
  // Three values per block.
  struct Sums {
    std::vector<double> sumsq, absmax, bad;
  };

  const Slot& At(int64_t slot) const;
  static Sums& LastAdded();  // memory of this thread
  static Sums& LastSet();    // the same; a gradient does not disturb what Repeat remembers
  // Reduces `x` as `slot` wants it; `row_sums` may be null.
  void Read(const Slot& slot, const Matrix& x, int num_threads, Sums* sums, double* row_sums) const;
  void CheckBlocks(const Slot& slot, const Matrix& x) const;
  void Merge(int64_t slot, const Sums& sums);  // mutex_ held

  const int64_t num_cells_;
  const std::vector<Slot> slots_;
  std::mutex mutex_;         // guards all below
  std::vector<double> row_;  // NaN where a block had a non-finite value
  std::vector<double> bad_;  // non-finite values per slot
  std::vector<char> seen_;
};

}  // namespace pyscan
