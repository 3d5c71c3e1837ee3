#include "bindings_usual_backwards.h"

#include <algorithm>

#include "bindings_tensor.h"

namespace py = pybind11;

namespace pyscan {
namespace {

// -1 for no gradient, and for one that counts no writes.
long WritesTo(const py::object& grad) {
  const long version = grad.is_none() ? -1 : VersionOf(grad.ptr());
  PyErr_Clear();
  return version;
}

}  // namespace

py::object UsualBackwards::Gradient(int64_t weight) const { return GradientOf(parameters_[weight]); }

UsualBackwards::State UsualBackwards::StateOf(int64_t weight) const {
  py::object grad = Gradient(weight);
  const long version = WritesTo(grad);
  return {std::move(grad), version};
}

void UsualBackwards::Begins(int64_t weight) {
  if (!are_few_) return;
  Check(1);
  may_have_missed_ |= weight != usual_.front();
  before_.clear();
  for (const int64_t i : usual_) before_.push_back(StateOf(i));
}

std::vector<int64_t> UsualBackwards::Ends(std::vector<int64_t> hooked) {
  if (!can_be_few_) return hooked;
  std::vector<int64_t> all;
  for (size_t k = 0; k < before_.size(); ++k) {
    const py::object grad = Gradient(usual_[k]);
    const bool is_same = grad.is(before_[k].grad) && WritesTo(grad) == before_[k].version;
    const bool is_hooked = std::find(hooked.begin(), hooked.end(), usual_[k]) != hooked.end();
    if (is_hooked || !is_same) all.push_back(usual_[k]);
  }
  before_.clear();
  if (are_few_) {
    is_surprised_ |= hooked.size() != 2 || all.size() != usual_.size();
  } else {
    const bool is_alike = hooked.size() == parameters_.size() && hooked == usual_;
    num_alike_ = is_alike ? num_alike_ + 1 : 0;
    usual_ = all = std::move(hooked);
  }
  if (usual_.empty()) return all;
  checked_ = (checked_ + 1) % int64_t(parameters_.size());
  as_read_ = {StateOf(checked_), StateOf(usual_.front())};
  return all;
}

// The first gradient may have been added to `num_added` times more than the other. Clipping writes to all gradients
// alike; a backward that nobody has seen does not.
void UsualBackwards::Check(long num_added) {
  if (as_read_.empty()) return;
  const State now = StateOf(checked_), first = StateOf(usual_.front());
  const bool are_same = now.grad.is(as_read_[0].grad) && first.grad.is(as_read_[1].grad);
  const long num_writes = now.version - as_read_[0].version, num_first = first.version - as_read_[1].version;
  if (are_same && checked_ != usual_.front() && num_writes != num_first - num_added)
    (are_few_ ? may_have_missed_ : is_irregular_) = true;
  as_read_.clear();
}

UsualBackwards::Change UsualBackwards::StepEnds(bool has_open, bool has_none) {
  if (!can_be_few_) return {};
  Check(0);
  const bool has_skipped = std::exchange(has_skipped_, false);
  if (!are_few_) {
    can_be_few_ = !is_irregular_;
    are_few_ = can_be_few_ && num_alike_ >= std::max(num_alike, int64_t(parameters_.size()));
    if (!are_few_) return {};
    return {true, {usual_.front(), usual_.back()}, false};
  }
  may_have_missed_ |= has_open;  // it raised
  if (has_none && !has_skipped)
    for (size_t i = 0; i < parameters_.size(); ++i) may_have_missed_ |= !Gradient(int64_t(i)).is_none();
  if (!may_have_missed_ && !is_surprised_) return {};
  can_be_few_ = are_few_ = false;
  return {true, {}, may_have_missed_};
}

void UsualBackwards::Clear() {
  parameters_.clear();
  before_.clear();
  as_read_.clear();
  can_be_few_ = are_few_ = false;
}

}  // namespace pyscan
