// The quick way around the model's own forward. pyscan/forward.py says what is taken from it; this is that for the
// plain case (gradients enabled, outside a backward, token ids in a tensor, a loss that is at hand), without a Python
// frame for each question: they run once in a step, where everything of Python's is out of the caches. Whatever is not
// plain goes back to forward.py. All of it runs under the GIL, which guards the state.

#include "bindings_forward.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <numeric>
#include <stdexcept>

#include "bindings.h"
#include "bindings_tensor.h"

namespace py = pybind11;

namespace pyscan {
namespace {

struct Names {
  py::object ids = Name("input_ids"), items = Name("num_items_in_batch"), loss = Name("loss"), get = Name("get");
};

// Made once and never freed: a hook may run until the process ends.
const Names& TheNames() {
  static const Names* const names = new Names;
  return *names;
}

// The argument of that name; nullptr without one. Its name is mostly the very object, and never a long one.
PyObject* Keyword(PyObject* const* values, PyObject* keywords, const py::object& name) {
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const given = PyTuple_GET_ITEM(keywords, i);
    if (given == name.ptr() || PyUnicode_Compare(given, name.ptr()) == 0) return values[i];
  }
  return nullptr;
}

}  // namespace

bool ForwardState::Counts() const { return active && IsGradEnabled() && GraphTask() == -1; }

std::optional<double> ForwardState::TakeLoss() {
  const std::vector<double> taken = TakeLosses();
  if (taken.empty()) return std::nullopt;
  return std::accumulate(taken.begin(), taken.end(), 0.0) / double(taken.size());
}

ForwardState* ForwardStateOf(const py::object& see) {
  return py::isinstance<ForwardState>(see) ? see.cast<ForwardState*>() : nullptr;
}

bool ForwardBegins(ForwardState& state, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  if (!state.Counts()) return true;
  if (state.capture == nullptr) return false;
  PyObject* const items = Keyword(args + num_args, keywords, TheNames().items);
  if (items != nullptr && items != Py_None) return false;
  PyObject* ids = Keyword(args + num_args, keywords, TheNames().ids);
  if (ids == nullptr && num_args > 0) ids = args[0];
  int64_t num_tokens;
  if (ids == nullptr || !NumIntegers(ids, &num_tokens)) return false;
  state.capture->ForwardBegins();
  ++state.num_forwards;
  state.AddTokens(num_tokens);
  return true;
}

bool ForwardEnds(ForwardState& state, PyObject* output) {
  if (!state.Counts()) return true;
  if (state.capture == nullptr) return false;
  if (IsTensor(output) || PyTuple_CheckExact(output)) {  // it names no loss
    state.capture->Forget();
    return true;
  }
  if (!state.has_targets) return false;
  const auto loss = py::reinterpret_steal<py::object>(
      PyDict_Check(output) ? PyObject_CallMethodOneArg(output, TheNames().get.ptr(), TheNames().loss.ptr())
                           : PyObject_GetAttr(output, TheNames().loss.ptr()));
  TensorView view;
  if (!loss || !ViewOf(loss.ptr(), &view) || view.numel != 1) return false;
  if (view.dtype != DType::kFloat32 && view.dtype != DType::kFloat64) return false;
  state.capture->Forget();
  const bool is_single = view.dtype == DType::kFloat32;
  state.losses.push_back(is_single ? *static_cast<const float*>(view.data) : *static_cast<const double*>(view.data));
  return true;
}

void BindForward(py::module_& m) {
  py::class_<ForwardState>(m, "ForwardState")
      .def(py::init([](const py::object& capture) {
        if (!HasTorch()) throw std::runtime_error("use_torch must be called first");
        return ForwardState{capture.is_none() ? nullptr : capture.cast<CaptureState*>(), capture};
      }))
      .def_readwrite("active", &ForwardState::active)
      .def_readwrite("has_targets", &ForwardState::has_targets)
      .def_readwrite("has_more", &ForwardState::has_more)
      .def_readwrite("num_forwards", &ForwardState::num_forwards)
      .def_readwrite("seconds", &ForwardState::seconds)
      .def("counts", &ForwardState::Counts)
      .def("add_tokens", &ForwardState::AddTokens)
      .def("add_loss", [](ForwardState& state, double loss) { state.losses.push_back(loss); })
      .def("take_tokens", &ForwardState::TakeTokens)
      .def("take_losses", &ForwardState::TakeLosses)
      .def("take_loss", &ForwardState::TakeLoss);
}

}  // namespace pyscan
