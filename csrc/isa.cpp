#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pyscan {

Isa BestIsa() {
#if defined(__x86_64__)
  static const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

Isa ParseIsa(const char* name) {
  if (std::strcmp(name, "baseline") == 0) return Isa::kBaseline;
  if (std::strcmp(name, "avx2") == 0) {
    if (BestIsa() == Isa::kAvx2) return Isa::kAvx2;
    throw std::invalid_argument("instruction set avx2 needs a processor with AVX2, FMA and F16C; use baseline");
  }
  throw std::invalid_argument("instruction set must be baseline or avx2, got " + std::string(name));
}

Isa ActiveIsa() {
  static const Isa isa = [] {
    const char* name = std::getenv("PYSCAN_ISA");
    return name != nullptr && *name != '\0' ? ParseIsa(name) : BestIsa();
  }();
  return isa;
}

const char* IsaName(Isa isa) { return isa == Isa::kAvx2 ? "avx2" : "baseline"; }

}  // namespace pyscan
