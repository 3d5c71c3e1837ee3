// The reduction for x86 with AVX-512 F, BW, DQ and VL: half the instructions of AVX2, so that reading is all it does.
#if defined(__AVX512F__)
#include "reduce_loop.h"

namespace pyscan {

void ReduceChunkAvx512(const Matrix& x, const Blocks& blocks, const Chunk& chunk, const ReduceOutput& out) {
  ReduceChunk(x, blocks, chunk, out);
}

}  // namespace pyscan
#endif
