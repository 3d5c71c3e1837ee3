// The quick way of an input from a hook to its slot. pyscan/capture.py says which inputs count; this is that decision
// for the plain case (an ordinary contiguous tensor, outside a backward, no mask), without a Python frame. Whatever is
// not plain goes back to capture.py. In front of it the shortcut of hooks.py to a module's forward. All of it runs
// under the GIL, which guards the state.

#include "bindings_observe.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_tensor.h"
#include "reduce.h"
#include "step_buffer.h"

namespace py = pybind11;

namespace pyscan {
namespace {

// Below this a tensor is read faster than another thread could take the GIL.
constexpr int64_t kReleaseBytes = int64_t{1} << 16;

}  // namespace

bool IsLast(const CaptureState& state, PyObject* x, long version) {
  return state.last.ptr() == x && state.last_version == version && state.last_thread == std::this_thread::get_id();
}

namespace {

struct Observer {
  StepBuffer* buffer;
  CaptureState* state;
  int64_t site;
  int64_t num_features;
  py::object owners[3];  // of buffer and state; and `careful`, the way for everything that is not plain
};

// True if the input was recorded; false, perhaps with an error set, if it needs care.
bool Record(const Observer& observer, PyObject* x) {
  CaptureState& state = *observer.state;
  if (state.has_mask || GraphTask() != -1) return false;
  // A trace begins with no input before it, and what is not recorded never becomes the last one.
  if (state.last.is_none() && IsTracing()) return false;
  const long version = VersionOf(x);
  if (IsLast(state, x, version)) {
    observer.buffer->Repeat(observer.site);
  } else {
    TensorView view;
    if (!ViewOf(x, &view) || !view.is_contiguous || view.data == nullptr || view.numel <= 0 || version < 0)
      return false;
    const int64_t cols = observer.num_features;
    const Matrix matrix{view.data, view.dtype, view.numel / cols, cols, cols, 1};
    py::object rows = py::none();
    double* row_sums = nullptr;
    if (state.keeps_rows) {
      py::array_t<double> sums(matrix.rows);
      row_sums = sums.mutable_data();
      rows = std::move(sums);
    }
    if (view.numel * ElementBytes(view.dtype) >= kReleaseBytes) {
      const py::gil_scoped_release release;
      observer.buffer->Add(observer.site, matrix, state.num_threads, row_sums);
    } else {
      observer.buffer->Add(observer.site, matrix, 1, row_sums);
    }
    state.last = py::reinterpret_borrow<py::object>(x);
    state.last_rows = std::move(rows);
    state.last_version = version;
    state.last_thread = std::this_thread::get_id();
  }
  PyByteArray_AS_STRING(state.direct.ptr())[observer.site] = 1;
  return true;
}

PyObject* See(PyObject* self, PyObject* x) {
  const auto& observer = *static_cast<Observer*>(PyCapsule_GetPointer(self, nullptr));
  if (!observer.state->active) Py_RETURN_NONE;
  observer.state->Meet(observer.site);
  if (!IsGradEnabled()) Py_RETURN_NONE;
  const auto start = std::chrono::steady_clock::now();
  bool recorded = false;
  try {
    recorded = Record(observer, x);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  PyErr_Clear();  // whatever went wrong here goes wrong again in `careful`, which knows whom to tell
  PyObject* result = recorded ? Py_NewRef(Py_None) : PyObject_CallOneArg(observer.owners[2].ptr(), x);
  observer.state->seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

PyMethodDef see_definition = {"see", See, METH_O, "Called with every tensor that is about to meet the weight."};

py::object MakeObserver(py::object buffer, py::object state, int64_t site, int64_t num_features, py::object careful) {
  if (!HasTorch()) throw std::runtime_error("use_torch must be called first");
  if (num_features < 1) throw py::value_error("num_features must be >= 1");
  auto& shared = state.cast<CaptureState&>();
  if (site < 0 || site >= PyByteArray_GET_SIZE(shared.direct.ptr())) throw py::value_error("there is no such site");
  auto* observer = new Observer{buffer.cast<StepBuffer*>(), &shared, site, num_features, {buffer, state, careful}};
  const py::capsule self(observer, [](void* p) { delete static_cast<Observer*>(p); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&see_definition, self.ptr()));
}

// The call of a module whose only hook is one of ours: torch's way around hooks takes longer than the hook itself.
struct Alone {
  py::object hook;
  std::vector<py::object> global_hooks;  // torch's dicts of hooks on every module
  py::str name_pre_hooks{"_forward_pre_hooks"};
  std::vector<py::str> names_others{"_forward_hooks", "_backward_hooks", "_backward_pre_hooks"};
  py::str name_probe, name_see{"see"};
};

// True if a plain call of the module would run the hook and forward, and nothing else.
bool IsAlone(const Alone& alone, PyObject* attributes) {
  if (!HasTorch()) return false;
  for (const py::object& hooks : alone.global_hooks)
    if (PyDict_GET_SIZE(hooks.ptr()) != 0) return false;
  for (const py::str& name : alone.names_others) {
    PyObject* hooks = PyDict_GetItemWithError(attributes, name.ptr());
    if (hooks == nullptr || !PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) != 0) return false;
  }
  PyObject* hooks = PyDict_GetItemWithError(attributes, alone.name_pre_hooks.ptr());
  if (hooks == nullptr || !PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) != 1) return false;
  Py_ssize_t position = 0;
  PyObject* hook = nullptr;
  return PyDict_Next(hooks, &position, nullptr, &hook) && hook == alone.hook.ptr() && !IsTracing();
}

// The first argument of a call; None without one.
PyObject* FirstArgument(PyObject* args, PyObject* kwargs) {
  if (PyTuple_GET_SIZE(args) > 0) return PyTuple_GET_ITEM(args, 0);
  Py_ssize_t position = 0;
  PyObject* value = Py_None;
  PyDict_Next(kwargs, &position, nullptr, &value);
  return value;
}

PyObject* SeeAlone(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  const auto& alone = *static_cast<Alone*>(PyCapsule_GetPointer(self, nullptr));
  if (num_args != 3 || !PyTuple_Check(args[1]) || !PyDict_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "a module, its arguments and its keywords are needed");
    return nullptr;
  }
  const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(args[0], nullptr));
  if (!attributes || !IsAlone(alone, attributes.ptr())) return PyErr_Clear(), Py_NewRef(Py_False);
  PyObject* probe = PyDict_GetItemWithError(attributes.ptr(), alone.name_probe.ptr());
  if (probe == nullptr) return PyErr_Clear(), Py_NewRef(Py_False);
  const auto see = py::reinterpret_steal<py::object>(PyObject_GetAttr(probe, alone.name_see.ptr()));
  if (!see) return nullptr;
  PyObject* seen = PyObject_CallOneArg(see.ptr(), FirstArgument(args[1], args[2]));
  if (seen == nullptr) return nullptr;
  Py_DECREF(seen);
  Py_RETURN_TRUE;
}

PyMethodDef see_alone_definition = {
    "see_alone", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(SeeAlone)), METH_FASTCALL,
    "(module, args, kwargs) -> whether forward is all that is left to call; if not, nothing was done."};

py::object MakeSeeAlone(const py::object& hook, const std::vector<py::object>& global_hooks, const py::str& probe) {
  for (const py::object& hooks : global_hooks)
    if (!PyDict_Check(hooks.ptr())) throw py::type_error("global_hooks must be dicts");
  auto* alone = new Alone{hook, global_hooks};
  alone->name_probe = probe;
  const py::capsule self(alone, [](void* p) { delete static_cast<Alone*>(p); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&see_alone_definition, self.ptr()));
}

void MeetMany(CaptureState& state, int64_t first, int64_t num_sites) {
  const auto known = static_cast<int64_t>(state.is_in_order.size());
  if (first < 0 || num_sites < 0 || first > known - num_sites) throw py::value_error("there is no such site");
  for (int64_t site = first; site < first + num_sites; ++site) state.Meet(site);
}

}  // namespace

double EndStep(CaptureState& state) {
  state.ForgetOrder();
  state.is_before_forward = true;
  state.Forget();
  return std::exchange(state.seconds, 0.0);
}

void BindObserve(py::module_& m) {
  py::class_<CaptureState>(m, "CaptureState")
      .def(py::init([](int64_t num_sites) {
        auto state = std::make_unique<CaptureState>();
        state->direct = py::reinterpret_steal<py::bytearray>(PyByteArray_FromStringAndSize(nullptr, num_sites));
        std::fill_n(PyByteArray_AS_STRING(state->direct.ptr()), num_sites, 0);
        state->is_in_order.resize(num_sites, 0);
        state->order.reserve(num_sites);
        return state;
      }))
      .def_readwrite("active", &CaptureState::active)
      .def_readwrite("has_mask", &CaptureState::has_mask)
      .def_readwrite("keeps_rows", &CaptureState::keeps_rows)
      .def_readwrite("num_threads", &CaptureState::num_threads)
      .def_readwrite("seconds", &CaptureState::seconds)
      .def_readonly("direct", &CaptureState::direct)
      .def_readonly("order", &CaptureState::order)
      .def("meet", &MeetMany)
      .def("forward_begins", &CaptureState::ForwardBegins)
      .def("end_step", [](CaptureState& state) { return EndStep(state); })
      .def("forget", &CaptureState::Forget);
  m.def("make_observer", &MakeObserver);
  m.def("make_see_alone", &MakeSeeAlone);
  m.def("use_torch", &UseTorch);
}

}  // namespace pyscan
