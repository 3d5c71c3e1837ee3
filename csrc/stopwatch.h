// How long a hook takes, by the processor's own counter. The system's clock lies in pages of its own: between two
// operators of a training, with neither in a cache, asking it takes up to 2 us.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace pyscan {

class Stopwatch {
 public:
  Stopwatch() : start_(Ticks()) {}

  // Since it was made. Never negative, whatever the counters of two cores say.
  double Seconds() const {
    const auto ticks = int64_t(Ticks() - start_);
    return ticks > 0 ? double(ticks) * counter.seconds_per_tick : 0.0;
  }

  // Finds out how fast the counter runs, from how far it has come since this library was loaded, a millisecond at
  // least. To be called before the first stopwatch is made.
  static void Calibrate();

 private:
  struct Counter {
    bool is_steady;  // it runs at one speed whatever the processor does; else the system's clock is asked
    double seconds_per_tick;
  };
  static Counter counter;

  static uint64_t Ticks() {
#if defined(__x86_64__)
    if (counter.is_steady) return __rdtsc();
#endif
    return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
  }

  uint64_t start_;
};

}  // namespace pyscan
