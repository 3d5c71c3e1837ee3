// The hooks of an optimizer. pyscan/steps.py says when a step begins and ends, pyscan/scanner.py what is done then;
// this is that for the plain case: step() without arguments, outside a GradScaler, of a scan of which there is nothing
// to say. Whatever is not plain goes back there. All of it runs under the GIL, which guards the state.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_forward.h"
#include "bindings_step.h"
#include "stopwatch.h"

namespace py = pybind11;

namespace pyscan {
namespace {

class StepState {
 public:
  // `first` and `last` are optimizers; `begins` and `ends` take what a hook of theirs is given, and do what is not
  // plain. `late(weights)` is told which gradients were read only when the optimizer stepped, `tell(seconds, is_taken,
  // seen)` of a row that was closed that long ago and not silently, `failed(error)` what went wrong.
  StepState(py::object first, py::object last, py::object begins, py::object ends, py::object late, py::object tell,
            py::object failed)
      : first_(std::move(first)),
        last_(std::move(last)),
        begins_(std::move(begins)),
        ends_(std::move(ends)),
        late_(std::move(late)),
        tell_(std::move(tell)),
        failed_(std::move(failed)) {}

  bool in_scaler = false;
  bool has_late = false;  // a gradient of this step was read late
  bool is_plain = false;  // the step may be closed here
  uint64_t step = 0;      // the number of the row that is being filled
  uint64_t next_row = 0;  // steps before that of this number have none, and are left out here
  double seconds = 0;     // spent before the optimizer's steps

  // What the hooks work with from now on; without `plain` no step is plain.
  void Use(py::object forward, py::object gradients, py::object plain) {
    owners_[0] = forward;
    owners_[1] = gradients;
    owners_[2] = plain;
    forward_ = forward.cast<ForwardState*>();
    gradients_ = plain.is_none() ? nullptr : GradientWatchOf(gradients);
    plain_ = plain.is_none() ? nullptr : plain.cast<PlainStep*>();
  }

  // Lets go of everything: nobody will call the hooks any more.
  void Close() {
    plain_ = nullptr;
    gradients_ = nullptr;
    first_ = last_ = begins_ = ends_ = late_ = tell_ = failed_ = owners_[0] = owners_[1] = owners_[2] = py::none();
  }

  void BeginRow() { row_ = Stopwatch(); }
  double RowSeconds() const { return row_.Seconds(); }

  // The hooks before and after a step of `optimizer`; false if the careful one has to be called.
  bool Begins() {
    if (in_scaler || gradients_ == nullptr) return false;
    const Stopwatch watch;
    const py::object owner = owners_[1];  // what is called here may close the scan
    return Guarded([&] {
      const std::vector<int64_t> late = ReadRest(*gradients_);
      if (const py::object tell = late_; !late.empty()) tell(late);
      seconds += watch.Seconds();
      return true;
    });
  }

  bool Ends(PyObject* optimizer) {
    if (in_scaler || plain_ == nullptr) return false;
    if (optimizer != last_.ptr()) return true;
    const Stopwatch watch;
    const py::object owner = owners_[2];
    return Guarded([&] { return (step + 1 < next_row && plain_->LeaveOut(watch, row_)) ? Next() : CloseRow(watch); });
  }

  const py::object& begins() const { return begins_; }
  const py::object& ends() const { return ends_; }

 private:
  bool Next() {
    ++step;
    BeginRow();
    return true;
  }

  bool CloseRow(const Stopwatch& watch) {
    PlainStep::Figures figures;
    if (!is_plain || has_late || forward_->has_more || !LearningRate(&figures.lr)) return false;
    figures.loss = forward_->TakeLoss();
    figures.tokens = forward_->TakeTokens();
    const std::optional<PlainStep::News> news = plain_->Close(watch, row_, step, figures);
    if (!news) return Next();
    const py::object tell = tell_;
    tell(watch.Seconds(), news->is_taken, news->seen);
    return true;
  }

  // That of the first group, if it has one; false where somebody has to look at it.
  bool LearningRate(std::optional<double>* rate) const {
    static PyObject* const name_groups = Name("param_groups").release().ptr();
    static PyObject* const name_rate = Name("lr").release().ptr();
    const auto groups = py::reinterpret_steal<py::object>(PyObject_GetAttr(first_.ptr(), name_groups));
    if (!groups) throw py::error_already_set();
    if (!PyList_CheckExact(groups.ptr()) || PyList_GET_SIZE(groups.ptr()) == 0) return false;
    PyObject* const group = PyList_GET_ITEM(groups.ptr(), 0);
    PyObject* const found = PyDict_Check(group) ? PyDict_GetItemWithError(group, name_rate) : nullptr;
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (found != nullptr && PyFloat_Check(found)) *rate = PyFloat_AS_DOUBLE(found);
    return found == nullptr || found == Py_None || rate->has_value();
  }

  // What `work` returns. No error of it reaches the host; after one there is nothing more to do. An interrupt is the
  // host's, and stays set.
  template <typename Work>
  bool Guarded(const Work& work) {
    const py::object failed = failed_;
    try {
      try {
        return work();
      } catch (py::error_already_set& error) {
        if (error.matches(PyExc_Exception))
          failed(error.value());
        else
          error.restore();
      } catch (const std::exception& error) {
        failed(py::reinterpret_steal<py::object>(PyObject_CallFunction(PyExc_RuntimeError, "s", error.what())));
      }
    } catch (py::error_already_set&) {  // whoever was told of the failure failed too
    }
    return true;
  }

  py::object first_, last_, begins_, ends_, late_, tell_, failed_;
  py::object owners_[3];  // of the three that follow
  ForwardState* forward_ = nullptr;
  GradientWatch* gradients_ = nullptr;
  PlainStep* plain_ = nullptr;
  Stopwatch row_;  // since the row that is being filled has begun
};

// A step that is given more than the optimizer may have a closure.
bool IsOrdinary(PyObject* const* given, Py_ssize_t num_given) {
  return num_given == 3 && PyTuple_Check(given[1]) && PyTuple_GET_SIZE(given[1]) <= 1 && PyDict_Check(given[2]) &&
         PyDict_GET_SIZE(given[2]) == 0;
}

StepState& StateOf(PyObject* self) {
  return *static_cast<py::object*>(PyCapsule_GetPointer(self, nullptr))->cast<StepState*>();
}

// None; or nullptr, if an interrupt is set.
PyObject* Done() { return PyErr_Occurred() == nullptr ? Py_NewRef(Py_None) : nullptr; }

PyObject* Begins(PyObject* self, PyObject* const* given, Py_ssize_t num_given) {
  StepState& state = StateOf(self);
  if (IsOrdinary(given, num_given) && state.Begins()) return Done();
  return PyObject_Vectorcall(state.begins().ptr(), given, num_given, nullptr);
}

PyObject* Ends(PyObject* self, PyObject* const* given, Py_ssize_t num_given) {
  StepState& state = StateOf(self);
  if (IsOrdinary(given, num_given) && state.Ends(given[0])) return Done();
  return PyObject_Vectorcall(state.ends().ptr(), given, num_given, nullptr);
}

PyMethodDef begins_definition = {"begins", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Begins)),
                                 METH_FASTCALL, "(optimizer, args, kwargs): called before a step."};
PyMethodDef ends_definition = {"ends", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Ends)), METH_FASTCALL,
                               "(optimizer, args, kwargs): called after a step."};

py::object MakeHook(PyMethodDef* definition, const py::object& state) {
  const py::capsule self(new py::object(state), [](void* p) { delete static_cast<py::object*>(p); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(definition, self.ptr()));
}

}  // namespace

void BindOptimizer(py::module_& m) {
  py::class_<StepState>(m, "StepState")
      .def(py::init<py::object, py::object, py::object, py::object, py::object, py::object, py::object>())
      .def_readwrite("in_scaler", &StepState::in_scaler)
      .def_readwrite("has_late", &StepState::has_late)
      .def_readwrite("is_plain", &StepState::is_plain)
      .def_readwrite("step", &StepState::step)
      .def_readwrite("next_row", &StepState::next_row)
      .def_readwrite("seconds", &StepState::seconds)
      .def("use", &StepState::Use)
      .def("close", &StepState::Close)
      .def("begin_row", &StepState::BeginRow)
      .def_property_readonly("row_seconds", &StepState::RowSeconds)
      .def("begins_hook", [](const py::object& state) { return MakeHook(&begins_definition, state); })
      .def("ends_hook", [](const py::object& state) { return MakeHook(&ends_definition, state); });
}

}  // namespace pyscan
