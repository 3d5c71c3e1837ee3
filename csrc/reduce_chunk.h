// Between the cutting of a matrix into chunks (reduce.cpp) and the loops compiled per instruction set.
#pragma once

#include <cstdint>

#include "reduce.h"

namespace pyscan {

// Rows that a float32 accumulator adds up before it is widened: 8 squares and 3 levels of a tree are 11 roundings of
// 2^-24, a relative error of at most 6.6e-7.
constexpr int64_t kTileRows = 8;
// Columns of a tile: 8 vectors of 8 floats, which with two maxima and temporaries fit 16 registers; or 4 of 16.
constexpr int64_t kTileCols = 64;
// Blocks whose sums a chunk keeps at hand: at most 9 KB of the first-level cache.
constexpr int64_t kMaxChunkBlocks = 64;
// Columns of a chunk at most; a longer row is read in pieces.
constexpr int64_t kChunkCols = 16384;

// A rectangle of the matrix and the partial results of the blocks it touches: `num_blocks` values each, beginning with
// block `first_block`. The loop overwrites them. Row sums are added straight to the caller's array, because no two
// chunks share a row when row sums are asked for.
struct Chunk {
  int64_t row_begin, row_end;
  int64_t col_begin, col_end;
  int64_t first_block, num_blocks;
  double* sumsq;
  double* absmax;
  double* bad;
};

using ReduceChunkFn = void (*)(const Matrix& x, const Blocks& blocks, const Chunk& chunk, const ReduceOutput& out);

void ReduceChunkBaseline(const Matrix&, const Blocks&, const Chunk&, const ReduceOutput&);
void ReduceChunkAvx2(const Matrix&, const Blocks&, const Chunk&, const ReduceOutput&);
void ReduceChunkAvx512(const Matrix&, const Blocks&, const Chunk&, const ReduceOutput&);

}  // namespace pyscan
