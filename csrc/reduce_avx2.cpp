// The reduction for x86 with AVX2, FMA and F16C; a file of its own because it has compiler flags of its own.
#if defined(__AVX2__)
#include "reduce_loop.h"

namespace pyscan {

void ReduceChunkAvx2(const Matrix& x, const Blocks& blocks, const Chunk& chunk, const ReduceOutput& out) {
  ReduceChunk(x, blocks, chunk, out);
}

}  // namespace pyscan
#endif
