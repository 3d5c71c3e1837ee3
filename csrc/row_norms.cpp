#include "row_norms.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace pyscan {
namespace {

// One call of Reduce over some rows; true if a value was not finite.
bool Read(const Matrix& x, const Blocks& blocks, bool per_block, int num_threads, double* sums) {
  const int64_t num_blocks = NumBlocks(x, blocks);
  thread_local std::vector<double> scratch;  // what Reduce finds besides
  scratch.assign(num_blocks + 2, 0.0);
  std::fill_n(sums, x.rows * (per_block ? num_blocks : 1), 0.0);
  const ReduceOutput out{scratch.data(), &scratch[num_blocks], &scratch[num_blocks + 1], true, sums, per_block};
  Reduce(x, blocks, out, num_threads, ActiveIsa());
  return scratch[num_blocks + 1] > 0;
}

// Columns of a block; without blocks, all of them.
int64_t Width(const Matrix& x, int64_t block) { return block == 0 ? std::max<int64_t>(x.cols, 1) : block; }

Matrix Part(const Matrix& x, int64_t row, int64_t col, int64_t cols) {
  Matrix part = x;
  part.data = static_cast<const char*>(x.data) + (row * x.row_stride + col * x.col_stride) * ElementBytes(x.dtype);
  part.rows = 1;
  part.cols = cols;
  return part;
}

}  // namespace

int64_t RowBlocks(const Matrix& x, int64_t block) {
  return block == 0 ? 1 : NumBlocks(x, {Blocks::Axis::kColumns, block, 0});
}

void RowSums(const Matrix& x, int64_t block, int num_threads, double* sums) {
  const Blocks blocks{Blocks::Axis::kColumns, Width(x, block), 0};
  if (Read(x, blocks, block != 0, num_threads, sums)) MarkBadRows(x, block, sums);
}

void MarkBadRows(const Matrix& x, int64_t block, double* sums) {
  const int64_t width = Width(x, block);
  const int64_t each = RowBlocks(x, block);
  for (int64_t i = 0; i < x.rows * each; ++i) {
    const int64_t col = i % each * width;
    const Matrix part = Part(x, i / each, col, std::min(width, x.cols - col));
    double ignored;
    if (Read(part, {Blocks::Axis::kColumns, width, 0}, false, 1, &ignored))
      sums[i] = std::numeric_limits<double>::quiet_NaN();
  }
}

}  // namespace pyscan
