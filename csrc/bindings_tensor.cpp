#include "bindings_tensor.h"

#include <string>

namespace py = pybind11;

namespace pyscan {
namespace {

// The part of DLPack 1.x that is used; its layout is fixed by that standard.
struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major, minor;
  void* previous;
  void* unused[3];
  int (*describe)(void* tensor, DlTensor* out);
  void* current_stream;
};

constexpr int32_t kDlCpu = 1;
constexpr uint8_t kDlInt = 0, kDlUint = 1, kDlFloat = 2, kDlBfloat = 4;

// Looked up once and never freed: a hook may run until the process ends.
struct Torch {
  PyObject* tensor_type;
  PyObject* is_grad_enabled;
  PyObject* graph_task_id;
  PyObject* tracing_state;
  PyObject* dtypes[4];  // in the order of DType
  const ExchangeApi* api;
  PyObject* name_dtype = PyUnicode_InternFromString("dtype");
  PyObject* name_version = PyUnicode_InternFromString("_version");
  PyObject* name_is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* name_data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* name_numel = PyUnicode_InternFromString("numel");
  PyObject* name_is_contiguous = PyUnicode_InternFromString("is_contiguous");
};

const Torch* torch = nullptr;

// An int from a call or attribute; -1 with an error set if there is none.
long long Number(PyObject* value) {
  if (value == nullptr) return -1;
  const long long number = PyLong_AsLongLong(value);
  Py_DECREF(value);
  return number;
}

bool Is(PyObject* value, PyObject* wanted) {
  Py_XDECREF(value);
  return value == wanted;
}

bool DTypeOf(const DlTensor& x, DType* dtype) {
  if (x.lanes != 1) return false;
  if (x.code == kDlBfloat && x.bits == 16) return *dtype = DType::kBfloat16, true;
  if (x.code != kDlFloat) return false;
  if (x.bits == 32) return *dtype = DType::kFloat32, true;
  if (x.bits == 16) return *dtype = DType::kFloat16, true;
  if (x.bits == 64) return *dtype = DType::kFloat64, true;
  return false;
}

bool ViewByTable(PyObject* x, TensorView* view) {
  DlTensor found;
  if (torch->api->describe(x, &found) != 0 || found.device_type != kDlCpu || !DTypeOf(found, &view->dtype))
    return false;
  view->data = static_cast<const char*>(found.data) + found.byte_offset;
  view->numel = 1;
  view->is_contiguous = true;
  for (int d = found.ndim - 1; d >= 0; --d) {
    if (found.strides != nullptr && found.shape[d] != 1 && found.strides[d] != view->numel) view->is_contiguous = false;
    view->numel *= found.shape[d];
  }
  return true;
}

bool ViewByAttributes(PyObject* x, TensorView* view) {
  if (!Is(PyObject_GetAttr(x, torch->name_is_cpu), Py_True)) return false;
  PyObject* dtype = PyObject_GetAttr(x, torch->name_dtype);
  Py_XDECREF(dtype);  // the four are immortal
  int code = 0;
  while (code < 4 && dtype != torch->dtypes[code]) ++code;
  if (code == 4) return false;
  view->dtype = DType(code);
  view->data = reinterpret_cast<const void*>(Number(PyObject_CallMethodNoArgs(x, torch->name_data_ptr)));
  view->numel = Number(PyObject_CallMethodNoArgs(x, torch->name_numel));
  view->is_contiguous = Is(PyObject_CallMethodNoArgs(x, torch->name_is_contiguous), Py_True);
  return PyErr_Occurred() == nullptr;
}

}  // namespace

void UseTorch(py::object tensor_type, py::object is_grad_enabled, py::object graph_task_id, py::object tracing_state,
              const py::tuple& dtypes, py::object exchange_api) {
  if (dtypes.size() != 4) throw py::value_error("dtypes must be 4, in the order of their codes");
  const auto* api = exchange_api.is_none()
                        ? nullptr
                        : static_cast<ExchangeApi*>(PyCapsule_GetPointer(exchange_api.ptr(), "dlpack_exchange_api"));
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (api != nullptr && api->major != 1) api = nullptr;
  auto* found = new Torch{tensor_type.release().ptr(),
                          is_grad_enabled.release().ptr(),
                          graph_task_id.release().ptr(),
                          tracing_state.release().ptr(),
                          {},
                          api};
  for (int code = 0; code < 4; ++code) found->dtypes[code] = py::object(dtypes[code]).release().ptr();
  torch = found;
}

bool HasTorch() { return torch != nullptr; }

bool IsTensor(PyObject* x) { return Py_TYPE(x) == reinterpret_cast<PyTypeObject*>(torch->tensor_type); }

bool ViewOf(PyObject* x, TensorView* view) {
  if (!IsTensor(x)) return false;
  return torch->api != nullptr ? ViewByTable(x, view) : ViewByAttributes(x, view);
}

bool NumIntegers(PyObject* x, int64_t* number) {
  DlTensor found;
  if (!IsTensor(x) || torch->api == nullptr || torch->api->describe(x, &found) != 0) return false;
  if (found.ndim < 1 || (found.code != kDlInt && found.code != kDlUint)) return false;
  *number = 1;
  for (int d = 0; d < found.ndim; ++d) *number *= found.shape[d];
  return true;
}

long VersionOf(PyObject* x) { return long(Number(PyObject_GetAttr(x, torch->name_version))); }

bool IsGradEnabled() { return Is(PyObject_CallNoArgs(torch->is_grad_enabled), Py_True); }

bool IsTracing() { return !Is(PyObject_CallNoArgs(torch->tracing_state), Py_None); }

int64_t GraphTask() { return Number(PyObject_CallNoArgs(torch->graph_task_id)); }

}  // namespace pyscan
