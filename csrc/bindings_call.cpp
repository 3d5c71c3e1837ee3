// The call of a module whose only hook is the one of hooks.py: torch's way around hooks takes longer than the hook
// itself. With any other hook, of the module or of every module, all of the call is left to torch. All of it runs under
// the GIL, which guards the state.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings.h"
#include "bindings_observe.h"
#include "bindings_tensor.h"
#include "stopwatch.h"

namespace py = pybind11;

namespace pyscan {
namespace {

// What the calls of all modules have in common.
struct Caller {
  py::object hook;
  std::vector<py::object> global_hooks;  // torch's dicts of hooks on every module
  py::object name_pre_hooks = Name("_forward_pre_hooks");
  py::object names_others[3] = {Name("_forward_hooks"), Name("_backward_hooks"), Name("_backward_pre_hooks")};
  py::object name_forward = Name("forward"), name_call = Name("_call_impl");
};

// Of one module: whom its input is given to, and the dicts in which the hook was last found alone, its attributes and
// four of hooks. While none of them has changed it still is alone. Only the first dict is asked for anew: while it is
// as it was, it keeps the others alive.
struct Watched {
  py::object see;
  const Observer* observer;  // behind `see`; nullptr: it is somebody else's
  PyObject* dicts[5] = {};
  uint64_t counts[5] = {};
};

bool IsUnchanged(const Watched& watched, PyObject* attributes) {
  if (!kCountsChanges || watched.dicts[0] != attributes) return false;
  for (int i = 0; i < 5; ++i)
    if (ChangesOf(watched.dicts[i]) != watched.counts[i]) return false;
  return true;
}

// True if the hook is the only one among those of the module.
bool Look(const Caller& caller, Watched& watched, PyObject* attributes) {
  PyObject* dicts[5] = {attributes, PyDict_GetItemWithError(attributes, caller.name_pre_hooks.ptr())};
  if (dicts[1] == nullptr || !PyDict_Check(dicts[1]) || PyDict_GET_SIZE(dicts[1]) != 1) return false;
  for (int i = 0; i < 3; ++i) {
    dicts[i + 2] = PyDict_GetItemWithError(attributes, caller.names_others[i].ptr());
    if (dicts[i + 2] == nullptr || !PyDict_Check(dicts[i + 2]) || PyDict_GET_SIZE(dicts[i + 2]) != 0) return false;
  }
  Py_ssize_t position = 0;
  PyObject* hook = nullptr;
  if (!PyDict_Next(dicts[1], &position, nullptr, &hook) || hook != caller.hook.ptr()) return false;
  for (int i = 0; i < 5; ++i) {
    watched.dicts[i] = dicts[i];
    watched.counts[i] = ChangesOf(dicts[i]);
  }
  return true;
}

// True if a plain call of the module would run the hook and forward, and nothing else.
bool IsAlone(const Caller& caller, Watched& watched, PyObject* attributes) {
  if (!HasTorch()) return false;
  for (const py::object& hooks : caller.global_hooks)
    if (PyDict_GET_SIZE(hooks.ptr()) != 0) return false;
  return (IsUnchanged(watched, attributes) || Look(caller, watched, attributes)) && !IsTracing();
}

// Gives the input to the probe; false, perhaps with an error set, if all of the call is left to torch.
bool See(const Caller& caller, Watched& watched, PyObject* module, PyObject* input) {
  const Stopwatch watch;
  const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!attributes || !IsAlone(caller, watched, attributes.ptr())) return false;
  PyObject* seen = watched.observer != nullptr ? SeeSince(watch, *watched.observer, input)
                                               : PyObject_CallOneArg(watched.see.ptr(), input);
  Py_XDECREF(seen);
  return seen != nullptr;
}

// The first argument of a call; None without one. What is watched and the module come before it.
PyObject* FirstArgument(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  const bool has_any = num_args > 2 || (keywords != nullptr && PyTuple_GET_SIZE(keywords) > 0);
  return has_any ? args[2] : Py_None;
}

PyObject* Call(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  const auto& caller = *static_cast<Caller*>(PyCapsule_GetPointer(self, nullptr));
  auto* watched = num_args < 2 ? nullptr : static_cast<Watched*>(PyCapsule_GetPointer(args[0], "watched"));
  if (watched == nullptr) {
    PyErr_SetString(PyExc_TypeError, "what is watched and the module are needed");
    return nullptr;
  }
  const bool is_seen = See(caller, *watched, args[1], FirstArgument(args, num_args, keywords));
  if (!is_seen && PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return nullptr;  // an interrupt is the host's
    PyErr_Clear();
  }
  const py::object& name = is_seen ? caller.name_forward : caller.name_call;
  return PyObject_VectorcallMethod(name.ptr(), args + 1, num_args - 1, keywords);
}

PyMethodDef call_definition = {"call_alone", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Call)),
                               METH_FASTCALL | METH_KEYWORDS,
                               "(watched, module, *args, **kwargs): the call of a watched module."};

py::object MakeCallAlone(const py::object& hook, const std::vector<py::object>& global_hooks) {
  for (const py::object& hooks : global_hooks)
    if (!PyDict_Check(hooks.ptr())) throw py::type_error("global_hooks must be dicts");
  const py::capsule self(new Caller{hook, global_hooks}, [](void* p) { delete static_cast<Caller*>(p); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&call_definition, self.ptr()));
}

py::capsule MakeWatched(const py::object& see) {
  return py::capsule(new Watched{see, ObserverOf(see.ptr())}, "watched",
                     [](void* p) { delete static_cast<Watched*>(p); });
}

}  // namespace

void BindCall(py::module_& m) {
  m.def("make_call_alone", &MakeCallAlone);
  m.def("make_watched", &MakeWatched);
}

}  // namespace pyscan
