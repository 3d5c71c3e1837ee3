// Cuts a matrix into chunks by its shape alone, has them reduced by the loops of the chosen instruction set, and adds
// the partial results in order.

#include "reduce.h"

#include <algorithm>
#include <vector>

#include "reduce_chunk.h"
#include "thread_pool.h"

namespace pyscan {
namespace {

// A chunk of a quarter of a megabyte takes ten to twenty microseconds: long against taking it, short against the whole.
constexpr int64_t kChunkBytes = int64_t{1} << 18;

ReduceChunkFn ChunkFn(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return ReduceChunkAvx512;
  if (isa == Isa::kAvx2) return ReduceChunkAvx2;
#endif
  (void)isa;
  return ReduceChunkBaseline;
}

// How the matrix is cut: `num_row_cuts` x `num_col_cuts` rectangles.
struct Cuts {
  int64_t rows_each, cols_each;
  int64_t num_row_cuts, num_col_cuts;
};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

Cuts Cut(const Matrix& x, const Blocks& blocks) {
  // One block is left free for the piece that begins inside a block.
  const int64_t most_blocked =
      blocks.size > INT64_MAX / kMaxChunkBlocks ? INT64_MAX : (kMaxChunkBlocks - 1) * blocks.size;
  const bool by_columns = blocks.axis == Blocks::Axis::kColumns;
  Cuts cuts;
  cuts.cols_each = std::min(x.cols, kChunkCols);
  if (by_columns) cuts.cols_each = std::min(cuts.cols_each, most_blocked);
  const int64_t row_bytes = cuts.cols_each * ElementBytes(x.dtype);
  cuts.rows_each = std::max(kTileRows, kChunkBytes / row_bytes / kTileRows * kTileRows);
  // An even number of equal chunks: of three, two threads would have to take two and one.
  const int64_t num_even = CeilDiv(CeilDiv(x.rows, cuts.rows_each), 2) * 2;
  if (x.rows > cuts.rows_each) cuts.rows_each = CeilDiv(CeilDiv(x.rows, num_even), kTileRows) * kTileRows;
  if (!by_columns) cuts.rows_each = std::min(cuts.rows_each, most_blocked);
  cuts.num_row_cuts = CeilDiv(x.rows, cuts.rows_each);
  cuts.num_col_cuts = CeilDiv(x.cols, cuts.cols_each);
  return cuts;
}

// One call of Reduce: what the tasks share.
class Job {
 public:
  Job(const Matrix& x, const Blocks& blocks, const ReduceOutput& out, ReduceChunkFn reduce_chunk,
      std::vector<double>& scratch)
      : x_(x), blocks_(blocks), out_(out), reduce_chunk_(reduce_chunk), cuts_(Cut(x, blocks)), scratch_(scratch) {
    scratch_.resize(3 * kMaxChunkBlocks * cuts_.num_row_cuts * cuts_.num_col_cuts);
  }

  // Row sums are added to by every chunk of a row, so then a task is a whole band of chunks.
  int64_t NumTasks() const { return out_.row_sumsq ? cuts_.num_row_cuts : cuts_.num_row_cuts * cuts_.num_col_cuts; }

  void RunTask(int64_t index) {
    const int64_t each = out_.row_sumsq ? cuts_.num_col_cuts : 1;
    for (int64_t i = index * each; i < (index + 1) * each; ++i) reduce_chunk_(x_, blocks_, At(i), out_);
  }

  void Merge() {
    for (int64_t i = 0; i < cuts_.num_row_cuts * cuts_.num_col_cuts; ++i) {
      const Chunk chunk = At(i);
      for (int64_t b = 0; b < chunk.num_blocks; ++b) {
        const int64_t block = chunk.first_block + b;
        const int64_t stat = out_.fold ? 0 : block;
        out_.sumsq[block] += chunk.sumsq[b];
        out_.absmax[stat] = std::max(out_.absmax[stat], chunk.absmax[b]);
        out_.bad[stat] += chunk.bad[b];
      }
    }
  }

 private:
  Chunk At(int64_t i) {
    Chunk chunk;
    chunk.row_begin = i / cuts_.num_col_cuts * cuts_.rows_each;
    chunk.row_end = std::min(chunk.row_begin + cuts_.rows_each, x_.rows);
    chunk.col_begin = i % cuts_.num_col_cuts * cuts_.cols_each;
    chunk.col_end = std::min(chunk.col_begin + cuts_.cols_each, x_.cols);
    const bool by_columns = blocks_.axis == Blocks::Axis::kColumns;
    const int64_t begin = by_columns ? chunk.col_begin : chunk.row_begin;
    const int64_t end = by_columns ? chunk.col_end : chunk.row_end;
    chunk.first_block = (begin + blocks_.first) / blocks_.size;
    chunk.num_blocks = (end - 1 + blocks_.first) / blocks_.size - chunk.first_block + 1;
    chunk.sumsq = scratch_.data() + 3 * kMaxChunkBlocks * i;
    chunk.absmax = chunk.sumsq + kMaxChunkBlocks;
    chunk.bad = chunk.absmax + kMaxChunkBlocks;
    return chunk;
  }

  const Matrix& x_;
  const Blocks& blocks_;
  const ReduceOutput& out_;
  const ReduceChunkFn reduce_chunk_;
  const Cuts cuts_;
  std::vector<double>& scratch_;
};

}  // namespace

int64_t ElementBytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
    default:
      return 2;
  }
}

int64_t NumBlocks(const Matrix& x, const Blocks& blocks) {
  const int64_t length = blocks.axis == Blocks::Axis::kColumns ? x.cols : x.rows;
  return length == 0 ? 0 : (length - 1 + blocks.first) / blocks.size + 1;
}

void Reduce(const Matrix& x, const Blocks& blocks, const ReduceOutput& out, int num_threads, Isa isa) {
  if (x.rows == 0 || x.cols == 0) return;
  thread_local std::vector<double> scratch;
  Job job(x, blocks, out, ChunkFn(isa), scratch);
  const auto run = [](void* context, int64_t i) { static_cast<Job*>(context)->RunTask(i); };
  ThreadPool::Instance().Run(job.NumTasks(), num_threads, run, &job);
  job.Merge();
}

}  // namespace pyscan
