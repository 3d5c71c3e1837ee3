// Sums of squares of the rows of a matrix, for tokens mode: one value per row, or one per row and block of columns.
#pragma once

#include <cstdint>

#include "reduce.h"

namespace pyscan {

// Writes to `sums`: [rows] if `block` is 0, else [rows, ceil(cols / block)]. A row or block with a value that is not
// finite gives NaN. The numerics are those of Reduce.
void RowSums(const Matrix& x, int64_t block, int num_threads, double* sums);

// Puts NaN in the place of the sums, as RowSums writes them, of rows or blocks that have a value that is not finite.
// Reads row by row: for matrices that are known to have one.
void MarkBadRows(const Matrix& x, int64_t block, double* sums);

// Number of values that RowSums writes for each row.
int64_t RowBlocks(const Matrix& x, int64_t block);

}  // namespace pyscan
