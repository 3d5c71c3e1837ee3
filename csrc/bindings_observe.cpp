// The quick way of an input from a hook to its slot. pyscan/capture.py says which inputs count; this is that decision
// for the plain case (an ordinary contiguous tensor, outside a backward, no mask), without a Python frame. Whatever is
// not plain goes back to capture.py. All of it runs under the GIL, which guards the state.

#include "bindings_observe.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_gradient.h"
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

struct Observer {
  StepBuffer* buffer;
  CaptureState* state;
  int64_t site;
  int64_t num_features;
  py::object owners[3];  // of buffer and state; and `careful`, the way for everything that is not plain
};

namespace {

// True if the input was recorded; false, perhaps with an error set, if it needs care.
bool Record(const Observer& observer, PyObject* x) {
  CaptureState& state = *observer.state;
  if (state.has_mask || GraphTask() != -1) return false;
  // A trace begins with no input before it, and what is not recorded never becomes the last one.
  if (state.last.is_none() && IsTracing()) return false;
  const long version = VersionByHandle(x);
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

// Records an input if it counts and is plain; false if it needs care.
bool Take(const Observer& observer, PyObject* x) {
  if (!observer.state->active) return true;
  observer.state->Meet(observer.site);
  if (!IsGradEnabled()) return true;
  bool recorded = false;
  try {
    recorded = Record(observer, x);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  PyErr_Clear();  // whatever went wrong here goes wrong again in `careful`, which knows whom to tell
  return recorded;
}

}  // namespace

PyObject* SeeSince(const Stopwatch& watch, const Observer& observer, PyObject* x) {
  PyObject* result = Take(observer, x) ? Py_NewRef(Py_None) : PyObject_CallOneArg(observer.owners[2].ptr(), x);
  observer.state->seconds += watch.Seconds();
  return result;
}

namespace {

PyObject* See(PyObject* self, PyObject* x) {
  return SeeSince(Stopwatch(), *static_cast<Observer*>(PyCapsule_GetPointer(self, nullptr)), x);
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

void MeetMany(CaptureState& state, int64_t first, int64_t num_sites) {
  const auto known = static_cast<int64_t>(state.is_in_order.size());
  if (first < 0 || num_sites < 0 || first > known - num_sites) throw py::value_error("there is no such site");
  for (int64_t site = first; site < first + num_sites; ++site) state.Meet(site);
}

}  // namespace

const Observer* ObserverOf(PyObject* see) {
  if (!PyCFunction_CheckExact(see) || PyCFunction_GET_FUNCTION(see) != &See) return nullptr;
  return static_cast<Observer*>(PyCapsule_GetPointer(PyCFunction_GET_SELF(see), nullptr));
}

double EndStep(CaptureState& state) {
  state.ForgetOrder();
  state.is_before_forward = true;
  state.Forget();
  return std::exchange(state.seconds, 0.0);
}

void BindObserve(py::module_& m) {
  py::class_<CaptureState>(m, "CaptureState")
      .def(py::init([](int64_t num_sites) {
        Stopwatch::Calibrate();
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
  m.def("use_torch", &UseTorch);
  m.def("torch_state", [] { return py::make_tuple(IsGradEnabled(), GraphTask(), IsTracing()); });
}

}  // namespace pyscan
