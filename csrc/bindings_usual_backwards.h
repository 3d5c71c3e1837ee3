// Which weights need a hook. Of a small model the calls of the hooks take longer than the reading. Where every backward
// has added to all weights in the same order, the hooks of the first and the last one are enough: the first looks at
// the gradients of all, and the end of the backward tells by their objects and versions which ones it added to. A
// backward that goes another way meets only the last of the two, or none: then a weight's gradient was written to more
// often than the first's, which is looked at for one weight after every backward. Whatever is not as usual brings all
// hooks back, for good. All of it runs under the GIL, which guards the state.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace pyscan {

class UsualBackwards {
 public:
  // So many backwards in a row must be alike, and as many as there are weights, before most hooks are taken away.
  static inline int64_t num_alike = 16;

  UsualBackwards(std::vector<pybind11::object> parameters, bool can_be_few)
      : parameters_(std::move(parameters)), can_be_few_(can_be_few && parameters_.size() > 2) {}

  // True if only the first and the last of the weights have hooks.
  bool are_few() const { return are_few_; }

  // A backward begins with the gradient of this weight, which it has already added to.
  void Begins(int64_t weight);
  // A backward is over that added to the weights of these hooks, in this order; where they are few, returns all weights
  // that it added to, in the usual order.
  std::vector<int64_t> Ends(std::vector<int64_t> hooked);
  // A backward was not scanned.
  void Skip() { has_skipped_ = true; }
  // After a backward, before the optimizer steps.
  void StepBegins() {
    if (can_be_few_) Check(0);
  }

  struct Change {
    bool is_any;                   // false: the hooks that were needed still are
    std::vector<int64_t> weights;  // that need hooks from now on; none: all do
    bool may_have_missed;          // gradients of the step that ends, or before it
  };
  // A step is over; `has_open`: one of its backwards has not ended; `has_none`: nobody has seen one, though it is
  // scanned.
  Change StepEnds(bool has_open, bool has_none);

  void Clear();

 private:
  struct State {
    pybind11::object grad;  // kept, so that no other gradient becomes the same object
    long version;
  };

  pybind11::object Gradient(int64_t weight) const;
  State StateOf(int64_t weight) const;
  void Check(long num_added);

  std::vector<pybind11::object> parameters_;
  bool can_be_few_, are_few_ = false;
  std::vector<int64_t> usual_;  // the weights that the last backward added to, in its order
  int64_t num_alike_ = 0;       // backwards in a row that were like the one before them
  std::vector<State> before_;   // few: the usual weights' gradients when the backward began
  int64_t checked_ = 0;         // the weight whose gradient is compared with the first's
  std::vector<State> as_read_;  // the gradients of these two at the end of the backward
  bool has_skipped_ = false;    // in this step
  bool is_irregular_ = false;   // what happens to the gradients would be taken for a backward that nobody has seen
  bool is_surprised_ = false, may_have_missed_ = false;  // few: and not as usual any longer
};

}  // namespace pyscan
