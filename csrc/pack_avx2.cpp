#if defined(__AVX2__)

#include "pack_loop.h"

namespace pyscan {

void PackAvx2(Codec codec, Transform transform, const double* cells, size_t count, void* out) {
  PackLoop(codec, transform, cells, count, out);
}

}  // namespace pyscan

#endif
