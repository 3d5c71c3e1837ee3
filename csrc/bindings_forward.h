// The forwards of a whole model, as far as they are plain. All of it is used under the GIL, which guards it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings_observe.h"

namespace pyscan {

// What the forwards of a step have shown, and how long the hooks took.
struct ForwardState {
  CaptureState* capture;     // told of beginnings and ends; nullptr: no forward is plain
  pybind11::object owner;    // of capture
  bool active = true;        // losses and tokens count
  bool has_targets = false;  // of the first forward with a loss, which forward.py looks for
  bool has_more = false;     // there is something that only forward.py knows
  int64_t num_forwards = 0;
  double seconds = 0;  // spent in the hooks
  std::optional<int64_t> num_tokens;
  std::vector<double> losses;

  // Whether this is a forward of the training: not one without gradients, nor one that is computed a second time.
  bool Counts() const;
  void AddTokens(int64_t number) { num_tokens = num_tokens.value_or(0) + number; }
  std::optional<int64_t> TakeTokens() { return std::exchange(num_tokens, std::nullopt); }
  std::vector<double> TakeLosses() { return std::exchange(losses, {}); }
  // The mean; nullopt if there is none.
  std::optional<double> TakeLoss();
};

// The state behind `see`; nullptr for any other object.
ForwardState* ForwardStateOf(const pybind11::object& see);
// A forward with these arguments (as of a vectorcall, without the module) begins, or has ended with `output`. False,
// perhaps with an error set, if forward.py has to look at it.
bool ForwardBegins(ForwardState& state, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords);
bool ForwardEnds(ForwardState& state, PyObject* output);

}  // namespace pyscan
