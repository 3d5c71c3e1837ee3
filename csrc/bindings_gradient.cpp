#include "bindings_gradient.h"

#include <dlfcn.h>

#include <cstring>
#include <exception>
#include <utility>

namespace py = pybind11;

namespace pyscan {
namespace {

// A handle points to a pointer to the tensor itself. What returns an int returns 0 unless it failed.
struct Functions {
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);

  template <typename Function>
  static Function* Find(void* library, const char* name) {
    return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
  }

  // const at::Tensor& c10::TensorImpl::grad() const
  void* (*grad)(void* tensor) = Find<void*(void*)>(c10, "_ZNK3c1010TensorImpl4gradEv");
  // int64_t at::TensorBase::_version() const
  int64_t (*version)(void* handle) = Find<int64_t(void*)>(torch, "_ZNK2at10TensorBase8_versionEv");
  int (*copy)(void*, void**) = Find<int(void*, void**)>(torch, "aoti_torch_new_tensor_handle");
  int (*release)(void*) = Find<int(void*)>(torch, "aoti_torch_delete_tensor_object");
  int (*is_defined)(void*, bool*) = Find<int(void*, bool*)>(torch, "aoti_torch_is_defined");
  int (*device_type)(void*, int32_t*) = Find<int(void*, int32_t*)>(torch, "aoti_torch_get_device_type");
  int (*dtype)(void*, int32_t*) = Find<int(void*, int32_t*)>(torch, "aoti_torch_get_dtype");
  int (*numel)(void*, int64_t*) = Find<int(void*, int64_t*)>(torch, "aoti_torch_get_numel");
  int (*is_contiguous)(void*, bool*) = Find<int(void*, bool*)>(torch, "aoti_torch_is_contiguous");
  int (*data)(void*, void**) = Find<int(void*, void**)>(torch, "aoti_torch_get_data_ptr");

  bool AreThere() const {
    return grad && version && copy && release && is_defined && device_type && dtype && numel && is_contiguous && data &&
           dtypes[0] >= 0 && dtypes[1] >= 0 && dtypes[2] >= 0 && dtypes[3] >= 0 && cpu >= 0;
  }

  int32_t Constant(const char* name) const {
    const auto function = Find<int32_t()>(torch, name);
    return function == nullptr ? -1 : function();
  }

  // In the order of DType.
  int32_t dtypes[4] = {Constant("aoti_torch_dtype_float32"), Constant("aoti_torch_dtype_bfloat16"),
                       Constant("aoti_torch_dtype_float16"), Constant("aoti_torch_dtype_float64")};
  int32_t cpu = Constant("aoti_torch_device_type_cpu");
};

// Looked up once and never freed: a hook may run until the process ends.
const Functions& Torch() {
  static const Functions* const functions = new Functions;
  return *functions;
}

bool are_handles_used = false;

// The tensor that a Python object of exactly torch's own types holds, behind what every object begins with.
void* TensorIn(PyObject* object) {
  void* tensor;
  std::memcpy(&tensor, reinterpret_cast<char*>(object) + sizeof(PyObject), sizeof(tensor));
  return tensor;
}

void* TensorAt(const void* handle) {
  void* tensor;
  std::memcpy(&tensor, handle, sizeof(tensor));
  return tensor;
}

// The handle of a gradient, which lives as long as it is the parameter's; null: it has none.
void* HandleOfGradient(PyObject* parameter) {
  void* const handle = Torch().grad(TensorIn(parameter));
  bool is_defined = false;
  return Torch().is_defined(handle, &is_defined) == 0 && is_defined ? handle : nullptr;
}

long VersionBy(void* handle) {
  try {
    return long(Torch().version(handle));
  } catch (const std::exception&) {  // made in inference mode
    return -1;
  }
}

// False, too, for a tensor without strides or an address, such as a sparse one: asking for them fails.
bool ViewBy(void* handle, TensorView* view) {
  const Functions& torch = Torch();
  int32_t device_type, dtype;
  if (torch.device_type(handle, &device_type) != 0 || device_type != torch.cpu) return false;
  if (torch.dtype(handle, &dtype) != 0) return false;
  int code = 0;
  while (code < 4 && dtype != torch.dtypes[code]) ++code;
  if (code == 4) return false;
  view->dtype = DType(code);
  void* data;
  if (torch.numel(handle, &view->numel) != 0 || torch.is_contiguous(handle, &view->is_contiguous) != 0 ||
      torch.data(handle, &data) != 0)
    return false;
  view->data = data;
  return true;
}

bool AreEqual(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.numel == b.numel && a.is_contiguous == b.is_contiguous;
}

// Whether a parameter's object is laid out as thought.
bool HoldsTensor(PyObject* parameter, const py::object& make_handle) {
  if (Py_TYPE(parameter)->tp_basicsize < Py_ssize_t(sizeof(PyObject) + sizeof(void*))) return false;
  const py::object capsule = make_handle(py::handle(parameter));
  void* const handle = PyCapsule_GetPointer(capsule.ptr(), PyCapsule_GetName(capsule.ptr()));
  if (handle == nullptr) throw py::error_already_set();
  const bool is_held = TensorAt(handle) == TensorIn(parameter);
  Torch().release(handle);
  return is_held;
}

// Whether handles tell the same as Python about a parameter that has a gradient, which has none itself.
bool TellTheSame(PyObject* parameter, PyObject* grad) {
  void* const handle = HandleOfGradient(parameter);
  if (handle == nullptr || TensorAt(handle) != TensorIn(grad)) return false;
  TensorView by_handle, by_python;
  if (!ViewBy(handle, &by_handle) || !ViewOf(grad, &by_python) || !AreEqual(by_handle, by_python)) return false;
  return VersionBy(handle) == VersionOf(grad) && HandleOfGradient(grad) == nullptr;
}

}  // namespace

bool UseHandles(const py::object& parameter, const py::object& make_handle) {
  are_handles_used = false;
  if (make_handle.is_none() || !HasTorch() || !Torch().AreThere()) return false;
  try {
    const py::object grad = GradientOf(parameter);
    if (!IsTensor(grad.ptr())) return false;
    const bool are_held = HoldsTensor(parameter.ptr(), make_handle) && HoldsTensor(grad.ptr(), make_handle);
    are_handles_used = are_held && TellTheSame(parameter.ptr(), grad.ptr());
    PyErr_Clear();
  } catch (const py::error_already_set&) {  // another torch may make no handles, or not of these
  }
  return are_handles_used;
}

long VersionByHandle(PyObject* x) {
  if (!are_handles_used || !IsTensor(x)) return VersionOf(x);
  return VersionBy(reinterpret_cast<char*>(x) + sizeof(PyObject));
}

Gradient::Gradient(const py::object& parameter, bool by_handle) : parameter_(parameter) {
  if (!by_handle || !are_handles_used) {
    object_ = GradientOf(parameter);
  } else if (void* const handle = HandleOfGradient(parameter.ptr())) {
    if (Torch().copy(handle, &handle_) != 0) object_ = GradientOf(parameter);
  }
}

Gradient::~Gradient() {
  if (handle_ != nullptr) Torch().release(handle_);
}

Gradient::Gradient(Gradient&& other) noexcept
    : parameter_(std::move(other.parameter_)),
      object_(std::move(other.object_)),
      handle_(std::exchange(other.handle_, nullptr)) {}

bool Gradient::is_none() const { return object_ ? object_.is_none() : handle_ == nullptr; }

long Gradient::Version() const {
  if (is_none()) return -1;
  if (!object_) return VersionBy(handle_);
  const long version = VersionOf(object_.ptr());
  PyErr_Clear();
  return version;
}

bool Gradient::View(TensorView* view) const {
  if (is_none()) return false;
  if (!object_) return ViewBy(handle_, view);
  const bool is_plain = ViewOf(object_.ptr(), view);
  PyErr_Clear();
  return is_plain;
}

const py::object& Gradient::Object() {
  if (!object_) object_ = GradientOf(parameter_);
  return object_;
}

}  // namespace pyscan
