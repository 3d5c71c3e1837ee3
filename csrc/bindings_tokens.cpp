// Tokens mode without Python frames: row sums of a plain tensor, and the quick way of a call through its two hooks.
// pyscan/token_capture.py says which calls count; a tap is that decision for the plain case (the input is the one that
// the observer has just read, row by row, and its rows are the tokens of the batch). Every other goes back to Python.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_observe.h"
#include "bindings_tensor.h"
#include "row_norms.h"
#include "stopwatch.h"

namespace py = pybind11;

namespace pyscan {
namespace {

// Below this a tensor is read faster than another thread could take the GIL.
constexpr int64_t kReleaseBytes = int64_t{1} << 16;

py::array_t<double> Sum(const Matrix& x, int64_t block, bool per_block, int num_threads) {
  if (block < 0) throw py::value_error("block must be >= 0, got " + std::to_string(block));
  const int64_t width = per_block && block == 0 ? std::max<int64_t>(x.cols, 1) : block;
  std::vector<py::ssize_t> shape{x.rows};
  if (per_block) shape.push_back(RowBlocks(x, width));
  py::array_t<double> sums(shape);
  double* const out = sums.mutable_data();
  if (x.rows * x.cols * ElementBytes(x.dtype) < kReleaseBytes) {
    RowSums(x, per_block ? width : 0, 1, out);
  } else {
    const py::gil_scoped_release release;
    RowSums(x, per_block ? width : 0, num_threads, out);
  }
  return sums;
}

// None unless the tensor is plain: contiguous, on the CPU, of one of the engine's dtypes.
py::object SumTensor(py::handle x, int64_t num_features, int64_t block, bool per_block, int num_threads) {
  if (!HasTorch()) throw std::runtime_error("use_torch must be called first");
  TensorView view;
  const bool is_plain = num_features > 0 && ViewOf(x.ptr(), &view) && view.is_contiguous && view.data != nullptr &&
                        view.numel % num_features == 0;
  PyErr_Clear();  // what has no view is not plain
  if (!is_plain) return py::none();
  const Matrix matrix{view.data, view.dtype, view.numel / num_features, num_features, num_features, 1};
  return Sum(matrix, block, per_block, num_threads);
}

py::array_t<double> SumMatrix(uintptr_t address, int dtype, int64_t rows, int64_t cols, int64_t row_stride,
                              int64_t col_stride, int64_t block, bool per_block, int num_threads) {
  if (dtype < 0 || dtype > 3) throw py::value_error("dtype must be 0 to 3, got " + std::to_string(dtype));
  if (rows < 0 || cols < 0) throw py::value_error("rows and cols must be >= 0");
  if (address == 0 && rows > 0 && cols > 0) throw py::value_error("address is null");
  const Matrix x{reinterpret_cast<const void*>(address), static_cast<DType>(dtype), rows, cols, row_stride, col_stride};
  return Sum(x, block, per_block, num_threads);
}

// Where the taps of one scanner put their calls.
struct TokenCalls {
  CaptureState* state;
  py::object owner;  // of state
  py::list calls;
  py::object make_call;           // Call
  py::object maker;               // of a view: whose node is to be watched
  int64_t batch = -1;             // the forward that runs
  py::object shape = py::none();  // of its tokens
  py::object name_shape = Name("shape"), name_base = Name("_base"), name_node = Name("grad_fn");
  py::object name_number = Name("output_nr"), name_register = Name("register_prehook"), name_grad = Name("grad");
};

// A hook on a module, after its forward.
struct Tap {
  TokenCalls* calls;
  int64_t site;
  py::object owner;    // of calls
  py::object careful;  // (x, out): a call that is not plain
  py::object arrived;  // (call, g): a gradient that is not plain
};

// A hook on the node of autograd that made an output.
struct Arrival {
  TokenCalls* calls;
  py::object owner;  // of calls
  py::object call;
  py::object arrived;
  int64_t number;  // of the node's output
  int64_t num_rows;
  bool has_come = false;  // what comes a second time is not plain
};

template <class T>
T& Self(PyObject* capsule) {
  return *static_cast<T*>(PyCapsule_GetPointer(capsule, nullptr));
}

template <class T>
py::object MakeFunction(PyMethodDef* definition, T* self) {
  const py::capsule capsule(self, [](void* p) { delete static_cast<T*>(p); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(definition, capsule.ptr()));
}

bool Add(Arrival& arrival, PyObject* g) {
  TensorView view;
  if (std::exchange(arrival.has_come, true) || !ViewOf(g, &view) || !view.is_contiguous || view.data == nullptr)
    return false;
  if (view.numel <= 0 || view.numel % arrival.num_rows != 0) return false;
  const int64_t cols = view.numel / arrival.num_rows;
  const Matrix matrix{view.data, view.dtype, arrival.num_rows, cols, cols, 1};
  py::setattr(arrival.call, arrival.calls->name_grad, Sum(matrix, 0, false, arrival.calls->state->num_threads));
  return true;
}

PyObject* Arrive(PyObject* self, PyObject* grads) {
  auto& arrival = Self<Arrival>(self);
  CaptureState& state = *arrival.calls->state;
  if (!state.active) Py_RETURN_NONE;
  const Stopwatch watch;
  bool is_added = false;
  auto g = py::reinterpret_steal<py::object>(PySequence_GetItem(grads, arrival.number));
  if (!g) g = py::none();
  try {
    is_added = Add(arrival, g.ptr());
  } catch (const std::exception&) {
  }
  PyErr_Clear();  // whatever went wrong here goes wrong again in `arrived`, which knows whom to tell
  PyObject* result = is_added
                         ? Py_NewRef(Py_None)
                         : PyObject_CallFunctionObjArgs(arrival.arrived.ptr(), arrival.call.ptr(), g.ptr(), nullptr);
  state.seconds += watch.Seconds();
  return result;
}

PyMethodDef arrive_definition = {"arrive", Arrive, METH_O, "Called with the gradients of a node's outputs."};

// True if the rows of x are the tokens of the batch, one by one.
bool IsInOrder(const TokenCalls& calls, py::handle x) {
  const py::object shape = x.attr(calls.name_shape);
  const auto rows = py::reinterpret_steal<py::object>(PySequence_GetSlice(shape.ptr(), 0, -1));
  return rows && rows.equal(calls.shape);
}

// True if the call was recorded; else nothing was done.
bool Record(const Tap& tap, PyObject* x, PyObject* out) {
  TokenCalls& calls = *tap.calls;
  const CaptureState& state = *calls.state;
  if (state.last_rows.is_none() || !IsGradEnabled() || GraphTask() != -1 || !IsTensor(out)) return false;
  if (!IsLast(state, x, VersionOf(x)) || !IsInOrder(calls, x)) return false;
  const py::object rows = state.last_rows;
  const py::object call = calls.make_call(tap.site, calls.batch, calls.shape, true, rows);
  auto made = py::reinterpret_borrow<py::object>(out);
  if (!made.attr(calls.name_base).is_none()) made = calls.maker(made);
  const py::object node = made.attr(calls.name_node);
  if (!node.is_none()) {
    const auto number = made.attr(calls.name_number).cast<int64_t>();
    const auto num_rows = static_cast<int64_t>(py::len(rows));
    auto* arrival = new Arrival{tap.calls, tap.owner, call, tap.arrived, number, num_rows};
    node.attr(calls.name_register)(MakeFunction(&arrive_definition, arrival));
  }
  calls.calls.append(call);
  return true;
}

PyObject* After(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  const auto& tap = Self<Tap>(self);
  if (num_args != 2) return PyErr_SetString(PyExc_TypeError, "an input and an output are needed"), nullptr;
  CaptureState& state = *tap.calls->state;
  if (!state.active) Py_RETURN_NONE;
  const Stopwatch watch;
  bool is_recorded = false;
  try {
    is_recorded = Record(tap, args[0], args[1]);
  } catch (const std::exception&) {
  }
  PyErr_Clear();  // as above
  state.seconds += watch.Seconds();
  if (is_recorded) Py_RETURN_NONE;
  return PyObject_CallFunctionObjArgs(tap.careful.ptr(), args[0], args[1], nullptr);
}

PyMethodDef after_definition = {"after", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(After)),
                                METH_FASTCALL, "Called with the input and the output of every forward of a module."};

py::object MakeTap(py::object owner, int64_t site, py::object careful, py::object arrived) {
  auto* calls = owner.cast<TokenCalls*>();
  return MakeFunction(&after_definition,
                      new Tap{calls, site, std::move(owner), std::move(careful), std::move(arrived)});
}

}  // namespace

void BindTokens(py::module_& m) {
  py::class_<TokenCalls>(m, "TokenCalls")
      .def(py::init([](py::object state, py::list calls, py::object make_call, py::object maker) {
        if (!HasTorch()) throw std::runtime_error("use_torch must be called first");
        auto* shared = state.cast<CaptureState*>();
        return std::unique_ptr<TokenCalls>(
            new TokenCalls{shared, std::move(state), std::move(calls), std::move(make_call), std::move(maker)});
      }))
      .def("begin", [](TokenCalls& calls, int64_t batch, py::object shape) {
        calls.batch = batch;
        calls.shape = std::move(shape);
      });
  m.def("make_tap", &MakeTap);
  m.def("row_sums", &SumTensor);
  m.def("row_sums_of", &SumMatrix);
}

}  // namespace pyscan
