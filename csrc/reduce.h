// The one reduction: read a matrix once and know, per block, the sum of squares, the largest magnitude and how many
// values are not finite.
//
// Numerics contract, the same for every instruction set:
//   - Sums of squares are float64. Their relative error is at most 1e-6 at any size: no float32 accumulator takes more
//     than kTileRows squares before it is added to a float64 one.
//   - The result does not depend on the number of threads, bit for bit: the matrix is cut into chunks by its shape
//     alone, and chunks are added in order.
//   - Values whose squares leave float32's range are summed in float64. The sum is right wherever float64 can hold it.
//   - Non-finite values are counted and left out of sum and maximum.
#pragma once

#include <cstdint>

#include "isa.h"

namespace pyscan {

enum class DType : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

int64_t ElementBytes(DType dtype);

// A view of somebody else's memory, which must stay alive and unchanged during the call. Strides are in elements and
// may be zero or negative; the address need not be aligned.
struct Matrix {
  const void* data;
  DType dtype;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;
};

// Blocks of `size` neighbouring columns (or rows). The first one begins at element `first` of a whole block, so that a
// shard can be cut where its blocks are cut in the whole weight. Invariant: size >= 1, 0 <= first < size.
struct Blocks {
  enum class Axis { kColumns, kRows };
  Axis axis;
  int64_t size;
  int64_t first;
};

// Number of blocks along the blocked axis; a matrix without elements on that axis has none.
int64_t NumBlocks(const Matrix& x, const Blocks& blocks);

// Where results go. Everything is added to what is there: sums and counts by +, maxima by max. `sumsq` has a value per
// block. `absmax` and `bad` have one per block, or a single one for all if `fold` is set.
// `row_sumsq` may be null; else it receives the sum of squares of each row, one value per row, or with `row_blocks` one
// per row and block ([rows, blocks], column blocks only).
struct ReduceOutput {
  double* sumsq;
  double* absmax;
  double* bad;
  bool fold;
  double* row_sumsq;
  bool row_blocks;
};

// Reduces `x` with at most `num_threads` threads, the caller being one of them. Small matrices use the caller alone.
void Reduce(const Matrix& x, const Blocks& blocks, const ReduceOutput& out, int num_threads, Isa isa);

}  // namespace pyscan
