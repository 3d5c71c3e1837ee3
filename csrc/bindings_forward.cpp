// The quick way around the model's own forward. pyscan/forward.py says what is taken from it; this is that for the
// plain case (gradients enabled, outside a backward, token ids in a tensor, a loss that is at hand), without a Python
// frame for each question: they run once in a step, where everything of Python's is out of the caches. Whatever is not
// plain goes back to forward.py. All of it runs under the GIL, which guards the state.

#include <pybind11/pybind11.h>

#include <stdexcept>

#include "bindings.h"
#include "bindings_observe.h"
#include "bindings_tensor.h"

namespace py = pybind11;

namespace pyscan {
namespace {

struct Forward {
  CaptureState* capture;
  py::object owner;
  py::object name_ids = Name("input_ids"), name_items = Name("num_items_in_batch");
  py::object name_loss = Name("loss"), name_get = Name("get");
};

const Forward& ForwardOf(PyObject* self) { return *static_cast<Forward*>(PyCapsule_GetPointer(self, nullptr)); }

bool IsPlain() { return HasTorch() && IsGradEnabled() && GraphTask() == -1; }

// What a question could not answer is asked again in forward.py, which knows whom to tell; an interrupt is the host's.
PyObject* LeaveIt() {
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0) return nullptr;
  PyErr_Clear();
  Py_RETURN_NONE;
}

PyObject* Begins(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  const Forward& forward = ForwardOf(self);
  if (num_args != 2 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "the arguments and the keywords of the model are needed");
    return nullptr;
  }
  if (!IsPlain()) return LeaveIt();
  PyObject* items = PyDict_GetItemWithError(args[1], forward.name_items.ptr());
  if (items != nullptr && items != Py_None) return LeaveIt();
  PyObject* ids = PyDict_GetItemWithError(args[1], forward.name_ids.ptr());
  if (ids == nullptr && PyTuple_GET_SIZE(args[0]) > 0) ids = PyTuple_GET_ITEM(args[0], 0);
  int64_t num_tokens;
  if (ids == nullptr || !NumIntegers(ids, &num_tokens)) return LeaveIt();
  forward.capture->ForwardBegins();
  return PyLong_FromLongLong(num_tokens);
}

PyObject* Ends(PyObject* self, PyObject* output) {
  const Forward& forward = ForwardOf(self);
  if (!IsPlain()) return LeaveIt();
  const auto loss = py::reinterpret_steal<py::object>(
      PyDict_Check(output) ? PyObject_CallMethodOneArg(output, forward.name_get.ptr(), forward.name_loss.ptr())
                           : PyObject_GetAttr(output, forward.name_loss.ptr()));
  TensorView view;
  if (!loss || !ViewOf(loss.ptr(), &view) || view.numel != 1) return LeaveIt();
  if (view.dtype != DType::kFloat32 && view.dtype != DType::kFloat64) return LeaveIt();
  forward.capture->Forget();
  const bool is_single = view.dtype == DType::kFloat32;
  return PyFloat_FromDouble(is_single ? *static_cast<const float*>(view.data) : *static_cast<const double*>(view.data));
}

PyMethodDef begins_definition = {
    "begins", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Begins)), METH_FASTCALL,
    "(args, kwargs) -> the number of tokens of a forward that begins; None: nothing was done."};
PyMethodDef ends_definition = {"ends", Ends, METH_O, "(output) -> the loss of a forward; None: nothing was done."};

py::tuple MakeForward(const py::object& capture) {
  if (!HasTorch()) throw std::runtime_error("use_torch must be called first");
  const py::capsule self(new Forward{capture.cast<CaptureState*>(), capture},
                         [](void* p) { delete static_cast<Forward*>(p); });
  return py::make_tuple(py::reinterpret_steal<py::object>(PyCFunction_New(&begins_definition, self.ptr())),
                        py::reinterpret_steal<py::object>(PyCFunction_New(&ends_definition, self.ptr())));
}

}  // namespace

void BindForward(py::module_& m) { m.def("make_forward", &MakeForward); }

}  // namespace pyscan
