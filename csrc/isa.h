// Which instruction set the compiled loops use: asked once, at the first call.
#pragma once

namespace pyscan {

enum class Isa { kBaseline = 0, kAvx2 = 1 };

// The best instruction set of this machine that this build has loops for.
Isa BestIsa();

// BestIsa(), unless the environment variable PYSCAN_ISA names another: "baseline" or "avx2".
// Throws std::invalid_argument if it names one that is unknown or that this machine cannot execute.
Isa ActiveIsa();

// Throws std::invalid_argument as ActiveIsa() does.
Isa ParseIsa(const char* name);
const char* IsaName(Isa isa);

}  // namespace pyscan
