// Which instruction set the compiled loops use: asked once, at the first call.
#pragma once

#include <vector>

namespace pyscan {

// In ascending order. Where a loop has no version for one, that of the one before is used.
enum class Isa { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// The best instruction set of this machine that this build has loops for.
Isa BestIsa();

// BestIsa(), unless the environment variable PYSCAN_ISA names another: "baseline", "avx2" or "avx512".
// Throws std::invalid_argument if it names one that is unknown or that this machine cannot execute.
Isa ActiveIsa();

// Throws std::invalid_argument as ActiveIsa() does.
Isa ParseIsa(const char* name);
const char* IsaName(Isa isa);
// All that this machine can execute.
std::vector<Isa> Isas();

}  // namespace pyscan
