// The thresholds between neighbouring codes of log2q8, as a table over the intervals of an octave. pack.h tells why
// the codes found with it are exact.
#pragma once

#include <cstdint>

#include "pack.h"

namespace pyscan {

inline constexpr int kTableBits = 9;
inline constexpr uint64_t kMantissaMask = (uint64_t{1} << 52) - 1;

// 2^kTableBits entries, one for each interval of mantissas. The upper 12 bits are the code at the start of the
// interval, counted from the start of the octave; the lower 52 bits the greatest mantissa that still has this code
// (all ones when the whole interval has it). Built at the first call, from any thread.
const uint64_t* Log2Table(Transform transform);

// The instances of the loops in pack_loop.h.
void PackBaseline(Codec codec, Transform transform, const double* cells, size_t count, void* out);
void PackAvx2(Codec codec, Transform transform, const double* cells, size_t count, void* out);

}  // namespace pyscan
