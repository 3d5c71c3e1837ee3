#include "bindings_tensor.h"

#include <dlfcn.h>

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

// Functions that torch's libraries export, by the names of C++. They answer what is asked at every site in a few
// instructions, where a call through Python takes hundreds. A library that exports no such name, or is not there by
// this name, gives nullptr.
template <typename Function>
Function Exported(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* found = dlsym(handle, name);
  dlclose(handle);  // which leaves it loaded: torch holds it
  return reinterpret_cast<Function>(found);
}

struct Native {
  // bool c10::GradMode::is_enabled()
  bool (*is_grad_enabled)() = Exported<bool (*)()>("libc10.so", "_ZN3c108GradMode10is_enabledEv");
  // int torch::autograd::get_current_graph_task_id()
  int (*graph_task_id)() = Exported<int (*)()>("libtorch_cpu.so", "_ZN5torch8autograd25get_current_graph_task_idEv");
  // const std::shared_ptr<TracingState>& torch::jit::tracer::getTracingState(); a shared_ptr begins with its pointer
  void* const* (*tracing_state)() = Exported<void* const* (*)()>("libtorch_cpu.so",
                                                                 "_ZN5torch3jit6tracer15getTracingStateEv");
};

// Looked up once and never freed: a hook may run until the process ends.
struct Torch {
  PyObject* tensor_type;
  PyObject* is_grad_enabled;
  PyObject* graph_task_id;
  PyObject* tracing_state;
  PyObject* dtypes[4];  // in the order of DType
  const ExchangeApi* api;
  Native native;
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
              const py::tuple& dtypes, py::object exchange_api, bool is_native) {
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
                          api,
                          is_native ? Native() : Native{nullptr, nullptr, nullptr}};
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

py::object GradientOf(const py::object& parameter) {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  PyObject* grad = PyObject_GetAttr(parameter.ptr(), name);
  if (grad == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(grad);
}

long VersionOf(PyObject* x) { return long(Number(PyObject_GetAttr(x, torch->name_version))); }

bool IsGradEnabled() {
  if (torch->native.is_grad_enabled != nullptr) return torch->native.is_grad_enabled();
  return Is(PyObject_CallNoArgs(torch->is_grad_enabled), Py_True);
}

bool IsTracing() {
  if (torch->native.tracing_state != nullptr) return *torch->native.tracing_state() != nullptr;
  return !Is(PyObject_CallNoArgs(torch->tracing_state), Py_None);
}

int64_t GraphTask() {
  if (torch->native.graph_task_id != nullptr) return torch->native.graph_task_id();
  return Number(PyObject_CallNoArgs(torch->graph_task_id));
}

}  // namespace pyscan
