// Packs every finite float32 that is not negative, as log2q8, with each instruction set and transform: codes never fall
// as values rise, and the first and the last value of each code, where its error is greatest, are within the bound.
// Ends with 1 at the first value that breaks this. An optimised build takes seconds for each of the 2^31 values.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "format.h"
#include "isa.h"
#include "pack.h"

namespace pyscan {
namespace {

constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kChunk = 1 << 15;
constexpr double kBound = 0.001356;

double ValueOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Whether the code stands for the value within the bound. Beyond 2^127.9 codes are clamped, and no bound is promised.
bool IsClose(Transform transform, double value, int16_t code) {
  if (value == 0.0) return code == kZeroCode;
  const double norm = transform == Transform::kRoot ? std::sqrt(value) : value;
  if (norm < std::exp2(-127.9) || norm > std::exp2(127.9)) return code >= -kMaxCode && code <= kMaxCode;
  return std::fabs(std::exp2(code / 256.0) / norm - 1.0) <= kBound;
}

bool CheckAll(Isa isa, Transform transform) {
  std::vector<double> values(kChunk);
  std::vector<int16_t> codes(kChunk);
  uint64_t num_codes = 1;
  double last_value = 0.0;
  int16_t last_code = kZeroCode;
  for (uint32_t start = 0; start < kInfinityBits; start += kChunk) {
    for (uint32_t i = 0; i < kChunk; ++i) values[i] = ValueOf(start + i);
    Pack(isa, Codec::kLog2q8, transform, values.data(), kChunk, codes.data());
    for (uint32_t i = 0; i < kChunk; ++i) {
      if (codes[i] == last_code) continue;
      const double before = i == 0 ? last_value : values[i - 1];
      if (codes[i] < last_code || !IsClose(transform, before, last_code) || !IsClose(transform, values[i], codes[i])) {
        std::fprintf(stderr, "bits %08x: code %d after code %d\n", start + i, codes[i], last_code);
        return false;
      }
      last_code = codes[i];
      ++num_codes;
    }
    last_value = values[kChunk - 1];
  }
  std::printf("ok: %u values, %llu codes\n", kInfinityBits, static_cast<unsigned long long>(num_codes));
  return IsClose(transform, last_value, last_code) && last_value == std::numeric_limits<float>::max();
}

}  // namespace
}  // namespace pyscan

int main() {
  using pyscan::Isa;
  static_assert(pyscan::kInfinityBits % pyscan::kChunk == 0, "chunks must end where the finite values end");
  for (const pyscan::Transform transform : {pyscan::Transform::kPlain, pyscan::Transform::kRoot}) {
    if (!pyscan::CheckAll(Isa::kBaseline, transform)) return 1;
    if (pyscan::BestIsa() != Isa::kBaseline && !pyscan::CheckAll(pyscan::BestIsa(), transform)) return 1;
  }
  return 0;
}
