#include "pack_loop.h"

namespace pyscan {

void PackBaseline(Codec codec, Transform transform, const double* cells, size_t count, void* out) {
  PackLoop(codec, transform, cells, count, out);
}

}  // namespace pyscan
