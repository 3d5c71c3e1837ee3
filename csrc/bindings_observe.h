// What the observers of one scanner share. All of it is used under the GIL, which guards it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "stopwatch.h"

namespace pyscan {

struct CaptureState {
  bool active = true;
  bool has_mask = false;
  bool keeps_rows = false;  // tokens mode: the read of an input also gives the sums of its rows
  int num_threads = 1;
  double seconds = 0;
  // The last input, kept alive so that its address is not given to another tensor.
  pybind11::object last = pybind11::none();
  long last_version = 0;
  std::thread::id last_thread;
  pybind11::object last_rows = pybind11::none();  // float64 [rows], if they are kept
  pybind11::bytearray direct;                     // sites ever recorded outside a backward
  // Sites in the order in which this step first met them, with gradients enabled or not: reentrant checkpointing
  // records its sites in the backward, last layer first, but has met them in the forward.
  std::vector<int64_t> order;
  std::vector<char> is_in_order;  // per site
  bool is_before_forward = true;  // no forward with gradients has begun in this step

  void Meet(int64_t site) {
    if (is_in_order[site]) return;
    is_in_order[site] = 1;
    order.push_back(site);
  }

  void ForgetOrder() {
    for (const int64_t site : order) is_in_order[site] = 0;
    order.clear();
  }

  // The first forward of a step is the one whose order counts, not a generate() before it.
  void ForwardBegins() {
    if (std::exchange(is_before_forward, false)) ForgetOrder();
  }

  void Forget() {
    last = pybind11::none();
    last_rows = pybind11::none();
  }
};

// Forgets the step; returns the seconds spent in it.
double EndStep(CaptureState& state);

// True if `x`, which counts `version` writes, is the last input as it was read, and this thread has read it.
bool IsLast(const CaptureState& state, PyObject* x, long version);

struct Observer;
// What an observer of make_observer has behind it; nullptr for any other callable.
const Observer* ObserverOf(PyObject* see);
// Gives it an input; `watch` was made when the call that brings it began. None, or nullptr with an error set.
PyObject* SeeSince(const Stopwatch& watch, const Observer& observer, PyObject* x);

}  // namespace pyscan
