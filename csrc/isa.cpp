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
  static const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx2) return has_avx512 ? Isa::kAvx512 : Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

std::vector<Isa> Isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512})
    if (isa <= BestIsa()) isas.push_back(isa);
  return isas;
}

Isa ParseIsa(const char* name) {
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (std::strcmp(name, IsaName(isa)) != 0) continue;
    if (isa <= BestIsa()) return isa;
    throw std::invalid_argument("instruction set " + std::string(name) + " is more than this processor has; use " +
                                IsaName(BestIsa()));
  }
  throw std::invalid_argument("instruction set must be baseline, avx2 or avx512, got " + std::string(name));
}

Isa ActiveIsa() {
  static const Isa isa = [] {
    const char* name = std::getenv("PYSCAN_ISA");
    return name != nullptr && *name != '\0' ? ParseIsa(name) : BestIsa();
  }();
  return isa;
}

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace pyscan
