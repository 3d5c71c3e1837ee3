// The call of a module that has no hooks but ours: torch's way around hooks takes longer than they do themselves. With
// any other hook, of the module or of every module, all of the call is left to torch. All of it runs under the GIL,
// which guards the state.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings.h"
#include "bindings_forward.h"
#include "bindings_observe.h"
#include "bindings_tensor.h"
#include "stopwatch.h"

namespace py = pybind11;

namespace pyscan {
namespace {

// What the calls of all modules have in common.
struct Caller {
  std::vector<py::object> global_hooks;  // torch's dicts of hooks on every module
  // Of the dicts in which a module keeps its hooks: first those of `Watched::hooks`, then those that must be empty.
  py::object names_hooks[4] = {Name("_forward_pre_hooks"), Name("_forward_hooks"), Name("_backward_hooks"),
                               Name("_backward_pre_hooks")};
  py::object name_forward = Name("forward"), name_call = Name("_call_impl");
};

// Of one module: our hooks before and after its forward, what is called in their place, and the dicts in which they
// were last found alone, the module's attributes and four of hooks. While none of them has changed they still are. Only
// the first dict is asked for anew: while it is as it was, it keeps the others alive.
struct Watched {
  py::object hooks[2];                 // null: none
  py::object see;                      // given the input, or where the only hook is one after forward, the output
  const Observer* observer = nullptr;  // behind `see`; nullptr: it is somebody else's
  ForwardState* forward = nullptr;     // of a whole model, in the place of `see`
  PyObject* dicts[5] = {};
  uint64_t counts[5] = {};
};

// The arguments of a vectorcall, without the module.
struct Arguments {
  PyObject* const* values;
  Py_ssize_t count;
  PyObject* keywords;

  // None without one.
  PyObject* First() const {
    return count > 0 || (keywords != nullptr && PyTuple_GET_SIZE(keywords) > 0) ? values[0] : Py_None;
  }

  py::tuple Positional() const {
    py::tuple made(count);
    for (Py_ssize_t i = 0; i < count; ++i) made[i] = py::reinterpret_borrow<py::object>(values[i]);
    return made;
  }

  py::dict Named() const {
    py::dict made;
    for (Py_ssize_t i = 0; keywords != nullptr && i < PyTuple_GET_SIZE(keywords); ++i)
      made[py::handle(PyTuple_GET_ITEM(keywords, i))] = py::reinterpret_borrow<py::object>(values[count + i]);
    return made;
  }
};

bool IsUnchanged(const Watched& watched, PyObject* attributes) {
  if (!kCountsChanges || watched.dicts[0] != attributes) return false;
  for (int i = 0; i < 5; ++i)
    if (ChangesOf(watched.dicts[i]) != watched.counts[i]) return false;
  return true;
}

// True if the hooks, of one kind, are this one and no other; null: there are none.
bool IsOnly(PyObject* hooks, PyObject* wanted) {
  if (hooks == nullptr || !PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) != (wanted != nullptr)) return false;
  Py_ssize_t position = 0;
  PyObject* hook = nullptr;
  return wanted == nullptr || (PyDict_Next(hooks, &position, nullptr, &hook) && hook == wanted);
}

// True if our hooks are the only ones among those of the module.
bool Look(const Caller& caller, Watched& watched, PyObject* attributes) {
  PyObject* dicts[5] = {attributes};
  for (int i = 0; i < 4; ++i) {
    dicts[i + 1] = PyDict_GetItemWithError(attributes, caller.names_hooks[i].ptr());
    if (!IsOnly(dicts[i + 1], i < 2 ? watched.hooks[i].ptr() : nullptr)) return false;
  }
  for (int i = 0; i < 5; ++i) {
    watched.dicts[i] = dicts[i];
    watched.counts[i] = ChangesOf(dicts[i]);
  }
  return true;
}

// True if a plain call of the module would run our hooks and forward, and nothing else.
bool IsAlone(const Caller& caller, Watched& watched, PyObject* module) {
  if (!HasTorch()) return false;
  for (const py::object& hooks : caller.global_hooks)
    if (PyDict_GET_SIZE(hooks.ptr()) != 0) return false;
  const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) return false;
  return (IsUnchanged(watched, attributes.ptr()) || Look(caller, watched, attributes.ptr())) && !IsTracing();
}

// True unless forward has taken the hook after it away.
bool HasAfter(const Caller& caller, const Watched& watched, PyObject* module) {
  const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) return false;
  if (IsUnchanged(watched, attributes.ptr())) return true;
  PyObject* const hooks = PyDict_GetItemWithError(attributes.ptr(), caller.names_hooks[1].ptr());
  if (hooks == nullptr || !PyDict_Check(hooks)) return false;
  Py_ssize_t position = 0;
  PyObject* hook = nullptr;
  while (PyDict_Next(hooks, &position, nullptr, &hook))
    if (hook == watched.hooks[1].ptr()) return true;
  return false;
}

// Whether the host goes on: an error of ours is none of its business, an interrupt is.
bool GoesOn() {
  if (PyErr_Occurred() == nullptr) return true;
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return false;
  PyErr_Clear();
  return true;
}

// A hook as torch would call it.
bool CallHook(const py::object& hook, const py::object& module, const py::object& args, const py::object& last) {
  PyObject* const given[] = {module.ptr(), args.ptr(), last.ptr()};
  return bool(py::reinterpret_steal<py::object>(PyObject_Vectorcall(hook.ptr(), given, 3, nullptr)));
}

// What comes before forward. False with an error set.
bool Before(const Watched& watched, const Stopwatch& watch, PyObject* module, const Arguments& given) {
  if (!watched.hooks[0]) return true;
  if (watched.forward != nullptr) {
    const bool is_seen = ForwardBegins(*watched.forward, given.values, given.count, given.keywords);
    watched.forward->seconds += watch.Seconds();
    if (is_seen) return true;
    return GoesOn() &&
           CallHook(watched.hooks[0], py::reinterpret_borrow<py::object>(module), given.Positional(), given.Named());
  }
  PyObject* const seen = watched.observer != nullptr ? SeeSince(watch, *watched.observer, given.First())
                                                     : PyObject_CallOneArg(watched.see.ptr(), given.First());
  Py_XDECREF(seen);
  return seen != nullptr || GoesOn();
}

// What comes after it. False with an error set.
bool After(const Watched& watched, PyObject* module, const Arguments& given, PyObject* output) {
  const Stopwatch watch;
  if (watched.forward != nullptr) {
    const bool is_seen = ForwardEnds(*watched.forward, output);
    watched.forward->seconds += watch.Seconds();
    if (is_seen) return true;
    return GoesOn() && CallHook(watched.hooks[1], py::reinterpret_borrow<py::object>(module), given.Positional(),
                                py::reinterpret_borrow<py::object>(output));
  }
  PyObject* const seen = watched.observer != nullptr ? SeeSince(watch, *watched.observer, output)
                                                     : PyObject_CallOneArg(watched.see.ptr(), output);
  Py_XDECREF(seen);
  return seen != nullptr || GoesOn();
}

PyObject* Call(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  const Stopwatch watch;
  const auto& caller = *static_cast<Caller*>(PyCapsule_GetPointer(self, nullptr));
  auto* watched = num_args < 2 ? nullptr : static_cast<Watched*>(PyCapsule_GetPointer(args[0], "watched"));
  if (watched == nullptr) {
    PyErr_SetString(PyExc_TypeError, "what is watched and the module are needed");
    return nullptr;
  }
  PyObject* const module = args[1];
  const Arguments given{args + 2, num_args - 2, keywords};
  const bool is_alone = IsAlone(caller, *watched, module);
  if (!GoesOn()) return nullptr;
  if (!is_alone) return PyObject_VectorcallMethod(caller.name_call.ptr(), args + 1, num_args - 1, keywords);
  if (!Before(*watched, watch, module, given)) return nullptr;
  PyObject* const output = PyObject_VectorcallMethod(caller.name_forward.ptr(), args + 1, num_args - 1, keywords);
  if (output == nullptr || !watched->hooks[1]) return output;
  auto owned = py::reinterpret_steal<py::object>(output);
  // Hooks that forward itself has added wait for the next call, as they do where torch finds none when a call begins.
  const bool is_there = HasAfter(caller, *watched, module);
  if (!GoesOn() || (is_there && !After(*watched, module, given, output))) return nullptr;
  return owned.release().ptr();
}

PyMethodDef call_definition = {"call_alone", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Call)),
                               METH_FASTCALL | METH_KEYWORDS,
                               "(watched, module, *args, **kwargs): the call of a watched module."};

py::object MakeCallAlone(const std::vector<py::object>& global_hooks) {
  for (const py::object& hooks : global_hooks)
    if (!PyDict_Check(hooks.ptr())) throw py::type_error("global_hooks must be dicts");
  const py::capsule self(new Caller{global_hooks}, [](void* p) { delete static_cast<Caller*>(p); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&call_definition, self.ptr()));
}

// `before` and `after` are our hooks, or None.
py::capsule MakeWatched(const py::object& before, const py::object& after, const py::object& see) {
  auto* const watched = new Watched;
  if (!before.is_none()) watched->hooks[0] = before;
  if (!after.is_none()) watched->hooks[1] = after;
  watched->see = see;
  watched->observer = ObserverOf(see.ptr());
  watched->forward = ForwardStateOf(see);
  return py::capsule(watched, "watched", [](void* p) { delete static_cast<Watched*>(p); });
}

}  // namespace

void BindCall(py::module_& m) {
  m.def("make_call_alone", &MakeCallAlone);
  m.def("make_watched", &MakeWatched);
}

}  // namespace pyscan
