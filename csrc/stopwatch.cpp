#include "stopwatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pyscan {
namespace {

using Clock = std::chrono::steady_clock;

// Time of the system's clock per its own tick.
constexpr double kSecondsPerClockTick = double(Clock::period::num) / double(Clock::period::den);
// Against this the microsecond that separates the two readings is little.
constexpr std::chrono::milliseconds kLeast{1};

#if defined(__x86_64__)
// "Invariant TSC": the same speed in all states of the processor, and the same count in all cores.
bool IsCounterSteady() {
  unsigned int a, b, c, d;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d & 1u << 8) != 0;
}

const uint64_t first_ticks = __rdtsc();
const Clock::time_point first_time = Clock::now();
#else
bool IsCounterSteady() { return false; }
#endif

}  // namespace

Stopwatch::Counter Stopwatch::counter{IsCounterSteady(), kSecondsPerClockTick};

void Stopwatch::Calibrate() {
#if defined(__x86_64__)
  if (!counter.is_steady) return;
  Clock::duration elapsed;
  do elapsed = Clock::now() - first_time;
  while (elapsed < kLeast);
  counter.seconds_per_tick = std::chrono::duration<double>(elapsed).count() / double(__rdtsc() - first_ticks);
#endif
}

}  // namespace pyscan
