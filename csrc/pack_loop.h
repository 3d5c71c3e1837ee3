// The packing loops, written once and compiled for each instruction set by pack_baseline.cpp and pack_avx2.cpp.
// Everything is in an anonymous namespace: the linker must not merge code of different instruction sets.
#pragma once

#include <cmath>
#include <cstring>

#include "format.h"
#include "pack.h"
#include "pack_table.h"

namespace pyscan {
namespace {

inline uint64_t BitsOf(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Free of branches. Subnormal numbers take the exponent -1023, which both transforms clamp.
inline int32_t Log2Code(const uint64_t* table, int32_t codes_per_octave, double value) {
  const uint64_t bits = BitsOf(value);
  const uint64_t mantissa = bits & kMantissaMask;
  const uint64_t entry = table[mantissa >> (52 - kTableBits)];
  const int32_t exponent = static_cast<int32_t>((bits >> 52) & 0x7ff) - 1023;
  const int32_t above = mantissa > (entry & kMantissaMask) ? 1 : 0;
  int32_t code = exponent * codes_per_octave + static_cast<int32_t>(entry >> 52) + above;
  code = code > kMaxCode ? kMaxCode : code;
  code = code < -kMaxCode ? -kMaxCode : code;
  code = value == 0.0 ? kZeroCode : code;
  code = value < 0.0 ? kAbsentCode : code;
  code = value == HUGE_VAL ? kInfCode : code;
  return value != value ? kNanCode : code;
}

void PackLog2q8(const uint64_t* table, int32_t codes_per_octave, const double* cells, size_t count, int16_t* out) {
  for (size_t i = 0; i < count; ++i) out[i] = static_cast<int16_t>(Log2Code(table, codes_per_octave, cells[i]));
}

template <bool kRoot>
void PackF32(const double* cells, size_t count, uint32_t* out) {
  for (size_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(kRoot ? std::sqrt(cells[i]) : cells[i]);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits = cells[i] != cells[i] ? 0x7fc00000u : bits;  // one NaN, never the one that means absent
    out[i] = cells[i] < 0.0 ? kAbsentFloatBits : bits;
  }
}

template <bool kRoot>
void PackU16(const double* cells, size_t count, uint16_t* out) {
  for (size_t i = 0; i < count; ++i) {
    double value = cells[i] > 0.0 ? cells[i] : 0.0;
    value = (kRoot ? std::sqrt(value) : value) + 0.5;
    out[i] = static_cast<uint16_t>(static_cast<int32_t>(value < 65535.0 ? value : 65535.0));
  }
}

void PackLoop(Codec codec, Transform transform, const double* cells, size_t count, void* out) {
  const bool root = transform == Transform::kRoot;
  switch (codec) {
    case Codec::kLog2q8:
      return PackLog2q8(Log2Table(transform), root ? 128 : 256, cells, count, static_cast<int16_t*>(out));
    case Codec::kF32:
      return (root ? PackF32<true> : PackF32<false>)(cells, count, static_cast<uint32_t*>(out));
    case Codec::kU16:
      return (root ? PackU16<true> : PackU16<false>)(cells, count, static_cast<uint16_t*>(out));
  }
}

}  // namespace
}  // namespace pyscan
