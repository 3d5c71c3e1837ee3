// Builds the threshold tables of log2q8, chooses the loop for the instruction set, and turns codes back into values.

#include "pack.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "format.h"
#include "pack_table.h"

namespace pyscan {
namespace {

using Table = std::array<uint64_t, size_t{1} << kTableBits>;

// 2^(numerator / 2^bits) for numerator < 2^bits, as a product of square roots of square roots of 2.
double FractionalPower(unsigned numerator, int bits) {
  double power = 1.0;
  double root = 2.0;
  for (int bit = bits - 1; bit >= 0; --bit) {
    root = std::sqrt(root);
    if ((numerator >> bit) & 1) power *= root;
  }
  return power;
}

// Greatest mantissa whose value lies below the threshold after the k-th code of an octave. No threshold is a double:
// they are irrational, and their rounding decides which side the nearest double takes.
uint64_t LastMantissa(unsigned k, int octave_bits) {
  const double threshold = FractionalPower(2 * k + 1, octave_bits + 1);
  uint64_t bits;
  std::memcpy(&bits, &threshold, sizeof(bits));
  return (bits & kMantissaMask) - 1;
}

Table BuildTable(int octave_bits) {
  Table table;
  const unsigned codes_per_octave = 1u << octave_bits;
  unsigned code = 0;
  for (uint64_t interval = 0; interval < table.size(); ++interval) {
    const uint64_t first = interval << (52 - kTableBits);
    const uint64_t last = first | (kMantissaMask >> kTableBits);
    const uint64_t limit = code < codes_per_octave ? LastMantissa(code, octave_bits) : kMantissaMask;
    table[interval] = uint64_t{code} << 52 | (limit < last ? limit : kMantissaMask);
    if (limit < last) ++code;
  }
  return table;
}

double Log2q8Value(int16_t code) {
  switch (code) {
    case kZeroCode:
      return 0.0;
    case kAbsentCode:
      return -1.0;
    case kNanCode:
      return std::numeric_limits<double>::quiet_NaN();
    case kInfCode:
      return HUGE_VAL;
    default:
      return std::exp2(code / 256.0);
  }
}

double F32Value(uint32_t bits) {
  if (bits == kAbsentFloatBits) return -1.0;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace

const uint64_t* Log2Table(Transform transform) {
  static const Table plain = BuildTable(8);
  static const Table root = BuildTable(7);
  return (transform == Transform::kRoot ? root : plain).data();
}

Codec ParseCodec(const char* name) {
  if (std::strcmp(name, "log2q8") == 0) return Codec::kLog2q8;
  if (std::strcmp(name, "u16") == 0) return Codec::kU16;
  if (std::strcmp(name, "f32") == 0) return Codec::kF32;
  throw std::invalid_argument("codec must be log2q8, u16 or f32, got " + std::string(name));
}

Transform ParseTransform(const char* name) {
  if (std::strcmp(name, "plain") == 0) return Transform::kPlain;
  if (std::strcmp(name, "root") == 0) return Transform::kRoot;
  throw std::invalid_argument("transform must be plain or root, got " + std::string(name));
}

void Pack(Isa isa, Codec codec, Transform transform, const double* cells, size_t count, void* out) {
#if defined(__x86_64__)
  if (isa != Isa::kBaseline) return PackAvx2(codec, transform, cells, count, out);
#else
  (void)isa;
#endif
  PackBaseline(codec, transform, cells, count, out);
}

void Unpack(Codec codec, const void* codes, size_t count, double* cells) {
  const auto* bytes = static_cast<const uint8_t*>(codes);
  for (size_t i = 0; i < count; ++i) {
    if (codec == Codec::kF32) {
      uint32_t bits;
      std::memcpy(&bits, bytes + 4 * i, sizeof(bits));
      cells[i] = F32Value(bits);
    } else {
      uint16_t code;
      std::memcpy(&code, bytes + 2 * i, sizeof(code));
      cells[i] = codec == Codec::kU16 ? code : Log2q8Value(static_cast<int16_t>(code));
    }
  }
}

}  // namespace pyscan
