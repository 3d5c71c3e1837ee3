// The reduction for any processor the compiler targets.
#include "reduce_loop.h"

namespace pyscan {

void ReduceChunkBaseline(const Matrix& x, const Blocks& blocks, const Chunk& chunk, const ReduceOutput& out) {
  ReduceChunk(x, blocks, chunk, out);
}

}  // namespace pyscan
