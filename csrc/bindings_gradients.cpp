// Which gradients are due, and the quick way of a plain one to its slot. pyscan/gradients.py says when a gradient
// counts; this is that decision without a Python frame per weight: a hook that autograd calls when it has added to a
// gradient, and the end of a backward. A gradient that is not plain goes back to gradients.py. All of it runs under the
// GIL, which guards the state.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_gradient.h"
#include "bindings_tensor.h"
#include "step_buffer.h"
#include "stopwatch.h"

namespace py = pybind11;

namespace pyscan {
namespace {

// Gradients of less than this together are read by the thread that the optimizer's step runs on: what other threads
// read lies in their caches.
constexpr int64_t kParallelBytes = int64_t{1} << 21;
// Small gradients are read together as soon as they are so many: they are still in a cache.
constexpr int64_t kBatchBytes = int64_t{1} << 20;

struct Weight {
  py::object parameter;
  std::vector<int64_t> slots;  // empty: its gradient is never plain
  int64_t rows, cols;
  bool read_at_once;          // large, and nothing changes it after autograd has added to it
  int64_t num_bytes;          // of its gradient; 0: it is never plain
  int64_t num_backwards = 0;  // so far in this step
  int64_t expected = 0;       // in the step before; 0: not known
  bool is_waiting = false;    // had a backward in this step and is to have another
  bool was_plain = false;     // when its gradient was last looked at
  // Of the gradient in the buffer; version -1: not read in this step.
  uintptr_t address = 0;
  long version = -1;
  // What a lookup has made of the gradient of its rows: the gradient is zero elsewhere, as long as it is that tensor.
  int64_t lookup_task = -1;  // the backward it was made in
  uintptr_t lookup_address = 0;
  long lookup_version = -1;
  std::vector<int64_t> looked_up;
};

}  // namespace

class GradientWatch {
 public:
  // (parameter, slots, rows, cols, read_at_once); `early`: nothing changes a gradient after autograd has added to it.
  using WeightTuple = std::tuple<py::object, std::vector<int64_t>, int64_t, int64_t, bool>;

  // At the first gradient of a backward `queue` is given what autograd is to call at its end, which calls `ended()` and
  // settles it; where `ended` is None, `begins(task)` is called instead, and somebody settles it. `careful(weight,
  // gradient, address, version)` reads one that is not plain unless it has this address and version, and returns those
  // it has; `gone(weight)` is told that there was no gradient left at the end of a backward; `failed(error)` what went
  // wrong.
  GradientWatch(py::object buffer, const std::vector<WeightTuple>& weights, bool early, py::object queue,
                py::object ended, py::object begins, py::object careful, py::object gone, py::object failed)
      : buffer_owner_(buffer),
        buffer_(buffer.cast<StepBuffer*>()),
        early_(early),
        queue_(std::move(queue)),
        ended_(std::move(ended)),
        begins_(std::move(begins)),
        careful_(std::move(careful)),
        gone_(std::move(gone)),
        failed_(std::move(failed)) {
    Stopwatch::Calibrate();
    for (const auto& [parameter, slots, rows, cols, read_at_once] : weights)
      weights_.push_back({parameter, slots, rows, cols, read_at_once, NumBytes(slots, rows, cols)});
  }

  // Lets go of everything: the hooks are about to be taken away.
  void Close() {
    active = false;
    weights_.clear();
    dirty_.clear();
    waiting_.clear();
    TakeGathered();
    queue_ = ended_ = begins_ = careful_ = gone_ = failed_ = py::none();
  }

  bool active = true;
  int num_threads = 1;
  double seconds = 0;         // spent in this step
  int64_t num_reads = 0;      // of gradients, since the beginning
  int64_t num_row_reads = 0;  // those of them that read looked-up rows only

  // Weights in the order in which their gradients first came in this step.
  const std::vector<int64_t>& order() const { return order_; }

  int64_t num_weights() const { return int64_t(weights_.size()); }

  // Autograd has added to the gradient of a weight; `self` is this object as Python knows it.
  void Accumulated(int64_t index, const py::object& self) {
    const int64_t task = GraphTask();
    auto dirty = dirty_.find(task);
    if (dirty == dirty_.end()) {
      dirty = dirty_.emplace(task, std::vector<int64_t>()).first;
      Begin(task, self);
    }
    dirty->second.push_back(index);
    const Weight& weight = Count(index);
    if (weight.num_backwards < weight.expected) return;
    if (weight.read_at_once) {
      if (!ReadLookedUp(index, task)) Read({index}, false);
    } else if (early_ && weight.num_bytes > 0)
      Gather(index);
  }

  // A backward is over, and so is whatever else changes its gradients: read what is due and not read, or changed since.
  void Settle(int64_t task) {
    TakeGathered();
    Timed([&] {
      const auto dirty = dirty_.find(task);
      std::vector<int64_t> ended;
      if (dirty != dirty_.end()) {
        ended = std::move(dirty->second);
        dirty_.erase(dirty);
      }
      Read(Due(ended), true);
    });
  }

  // A backward is over, as autograd tells; the hooks may have been taken away meanwhile.
  void Ended(int64_t task) {
    if (ended_.is_none()) return;
    ended_();
    Settle(task);
  }

  // Reads what the step has not read yet; returns the weights that were read so late.
  std::vector<int64_t> ReadRest() {
    std::vector<int64_t> late;
    for (int64_t i = 0; i < num_weights(); ++i)
      if (weights_[i].version < 0 && weights_[i].num_backwards > 0 && HasGradient(weights_[i])) late.push_back(i);
    Read(late, false);
    return late;
  }

  // Reads every gradient there is, in the place of what was read: something has changed them all.
  void ReadAll() {
    Timed([&] {
      std::vector<int64_t> there;
      for (int64_t i = 0; i < num_weights(); ++i) {
        if (!HasGradient(weights_[i])) continue;
        Count(i);
        there.push_back(i);
      }
      Read(there, false);
    });
  }

  // The row is closed: what was counted is what to expect. Returns the seconds spent in the step that ended.
  double NextStep() {
    order_.clear();
    dirty_.clear();
    waiting_.clear();
    TakeGathered();
    if (num_ends_ > 0) expected_ends_ = std::exchange(num_ends_, 0);
    for (Weight& weight : weights_) {
      if (weight.num_backwards > 0) weight.expected = weight.num_backwards;
      weight.num_backwards = 0;
      weight.is_waiting = false;
      weight.version = -1;
    }
    return std::exchange(seconds, 0.0);
  }

  // A lookup of these rows has made `gradient` of its weight, which it now hands on.
  void LookedUp(int64_t index, PyObject* gradient, const py::array_t<int64_t, py::array::c_style>& rows) {
    Weight& weight = weights_[index];
    weight.lookup_task = -1;
    TensorView view;
    if (!ViewOf(gradient, &view)) {
      PyErr_Clear();
      return;
    }
    weight.lookup_version = VersionByHandle(gradient);
    weight.lookup_address = reinterpret_cast<uintptr_t>(view.data);
    weight.looked_up.assign(rows.data(), rows.data() + rows.size());
    weight.lookup_task = GraphTask();
  }

  // Runs `work` and counts its time; no exception of it reaches autograd.
  template <typename Work>
  void Timed(const Work& work) {
    const Stopwatch watch;
    Guarded(work);
    seconds += watch.Seconds();
  }

  // Runs `work`; no exception of it reaches autograd.
  template <typename Work>
  void Guarded(const Work& work) {
    try {
      try {
        work();
      } catch (py::error_already_set& error) {
        failed_(error.value());
      } catch (const std::exception& error) {
        failed_(py::reinterpret_steal<py::object>(PyObject_CallFunction(PyExc_RuntimeError, "s", error.what())));
      }
    } catch (py::error_already_set&) {  // whoever was told of the failure failed too
    }
  }

 private:
  // As in most trainings; where a gradient has another type, batches are only larger or smaller.
  static int64_t NumBytes(const std::vector<int64_t>& slots, int64_t rows, int64_t cols) {
    return slots.empty() ? 0 : rows * cols * int64_t(sizeof(float));
  }

  void Begin(int64_t task, const py::object& self);

  // Autograd has added to the gradient of a weight.
  const Weight& Count(int64_t index) {
    Weight& weight = weights_[index];
    if (++weight.num_backwards == 1) order_.push_back(index);
    weight.version = -1;  // also if the new gradient has the address and the version of an old one
    return weight;
  }

  // Reads a small gradient together with those that came before it, once they are worth a call.
  void Gather(int64_t index) {
    gathered_.push_back(index);
    gathered_bytes_ += weights_[index].num_bytes;
    if (gathered_bytes_ >= kBatchBytes) Read(TakeGathered(), false);
  }

  std::vector<int64_t> TakeGathered() {
    gathered_bytes_ = 0;
    return std::exchange(gathered_, {});
  }

  // Reads the gradient of a weight whose rows were looked up, once, in this backward; false if it is not that alone. A
  // gradient that something was added to is another tensor, or counts a write more. Hooks of the weight may make
  // another one, and that may get the address of the first.
  bool ReadLookedUp(int64_t index, int64_t task) {
    Weight& weight = weights_[index];
    if (task == -1 || weight.lookup_task != task || weight.slots.size() != 1) return false;
    weight.lookup_task = -1;
    const py::object hooks = weight.parameter.attr("_backward_hooks");
    if (!hooks.is_none() && py::len(hooks) > 0) return false;
    Gradient grad(weight.parameter, weight.was_plain);
    TensorView view;
    if (!grad.View(&view) || !view.is_contiguous || view.numel != weight.rows * weight.cols) return false;
    const auto address = reinterpret_cast<uintptr_t>(view.data);
    const long version = grad.Version();
    if (version < 0 || version != weight.lookup_version || address != weight.lookup_address) return false;
    std::vector<int64_t>& rows = weight.looked_up;
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    if (rows.empty() || rows.front() < 0 || rows.back() >= weight.rows) return false;
    weight.was_plain = true;
    weight.address = address;
    weight.version = version;
    ++num_reads;
    ++num_row_reads;
    const py::gil_scoped_release release;
    const int64_t row_bytes = weight.cols * ElementBytes(view.dtype);
    copied_rows_.resize(rows.size() * row_bytes);
    for (size_t i = 0; i < rows.size(); ++i)
      std::memcpy(copied_rows_.data() + i * row_bytes, static_cast<const char*>(view.data) + rows[i] * row_bytes,
                  row_bytes);
    const Matrix x{copied_rows_.data(), view.dtype, int64_t(rows.size()), weight.cols, weight.cols, 1};
    buffer_->Set(weight.slots[0], x, num_threads);
    return true;
  }

  static bool HasGradient(const Weight& weight) { return !Gradient(weight.parameter, weight.was_plain).is_none(); }

  // Of the weights of a backward that ended, those that wait for no other in this step. Not every weight takes part in
  // every backward (experts, heads of several tasks): after the last backward none waits any longer.
  std::vector<int64_t> Due(const std::vector<int64_t>& ended) {
    ++num_ends_;
    const bool is_last = expected_ends_ > 0 && num_ends_ >= expected_ends_;
    std::vector<int64_t> due;
    for (const int64_t i : ended) {
      Weight& weight = weights_[i];
      const bool waits = !is_last && weight.num_backwards < weight.expected;
      if (!waits)
        due.push_back(i);
      else if (!weight.is_waiting)
        waiting_.push_back(i);
      weight.is_waiting = waits;
    }
    if (!is_last) return due;
    for (const int64_t i : waiting_)
      if (weights_[i].is_waiting && HasGradient(weights_[i])) due.push_back(i);
    for (const int64_t i : waiting_) weights_[i].is_waiting = false;
    waiting_.clear();
    return due;
  }

  void Read(const std::vector<int64_t>& indices, bool at_end) {
    std::vector<StepBuffer::Item> items;
    std::vector<Gradient> kept;  // the gradients that are read without the GIL
    int64_t bytes = 0;
    for (const int64_t i : indices) {
      Weight& weight = weights_[i];
      Gradient grad(weight.parameter, weight.was_plain);
      if (grad.is_none()) {
        if (at_end) gone_(i);
        continue;
      }
      TensorView view;
      weight.was_plain = !weight.slots.empty() && grad.View(&view) && view.is_contiguous &&
                         view.numel == weight.rows * weight.cols && view.data != nullptr;
      if (!weight.was_plain) {
        ++num_reads;
        const auto [address, version] =
            careful_(i, grad.Object(), weight.address, weight.version).cast<std::pair<uintptr_t, long>>();
        weight.address = address;
        weight.version = version;
        continue;
      }
      const auto address = reinterpret_cast<uintptr_t>(view.data);
      // Nobody compares with what is read first at the end: until autograd adds again it is not read again.
      const long version = at_end && weight.version < 0 ? 0 : grad.Version();
      if (version >= 0 && weight.version == version && weight.address == address) continue;
      weight.address = address;
      weight.version = version;
      ++num_reads;
      const Matrix x{view.data, view.dtype, weight.rows, weight.cols, weight.cols, 1};
      for (const int64_t slot : weight.slots) items.push_back({slot, x});
      bytes += view.numel * ElementBytes(view.dtype);
      kept.push_back(std::move(grad));
    }
    if (items.empty()) return;
    const py::gil_scoped_release release;
    if (items.size() == 1)
      buffer_->Set(items[0].slot, items[0].x, num_threads);
    else
      buffer_->SetMany(items, bytes >= kParallelBytes ? num_threads : 1);
  }

  const py::object buffer_owner_;
  StepBuffer* const buffer_;
  const bool early_;
  py::object queue_, ended_, begins_, careful_, gone_, failed_;
  std::vector<Weight> weights_;
  // Backwards whose end is being waited for, with the weights they have added to. Reentrant checkpointing runs one
  // backward inside another; one that raised never ends, and is forgotten with the step.
  std::map<int64_t, std::vector<int64_t>> dirty_;
  std::vector<int64_t> waiting_;
  std::vector<int64_t> gathered_;  // small gradients that came and are not read yet
  int64_t gathered_bytes_ = 0;
  std::vector<char> copied_rows_;
  std::vector<int64_t> order_;
  int64_t num_ends_ = 0;       // of backwards in this step
  int64_t expected_ends_ = 0;  // as many as in the step before; 0: not known
};

namespace {

// What autograd calls at the end of a backward.
struct End {
  GradientWatch* watch;
  int64_t task;
  py::object owner;
};

PyObject* Ended(PyObject* self, PyObject*) {
  const auto& end = *static_cast<End*>(PyCapsule_GetPointer(self, nullptr));
  end.watch->Guarded([&] { end.watch->Ended(end.task); });
  Py_RETURN_NONE;
}

PyMethodDef ended_definition = {"ended", Ended, METH_NOARGS, "Called at the end of a backward."};

py::object MakeEnd(GradientWatch* watch, int64_t task, const py::object& owner) {
  const py::capsule self(new End{watch, task, owner}, [](void* p) { delete static_cast<End*>(p); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&ended_definition, self.ptr()));
}

}  // namespace

// Outside a backward (-1) there is no end to wait for: a pipeline reduces its last gradients after it.
void GradientWatch::Begin(int64_t task, const py::object& self) {
  if (ended_.is_none())
    begins_(task);
  else if (task != -1)
    queue_(MakeEnd(this, task, self));
}

GradientWatch* GradientWatchOf(const py::object& object) { return object.cast<GradientWatch*>(); }

double EndStep(GradientWatch& watch) { return watch.NextStep(); }

std::vector<int64_t> ReadRest(GradientWatch& watch) { return watch.active ? watch.ReadRest() : std::vector<int64_t>(); }

namespace {

struct Hook {
  GradientWatch* watch;
  int64_t weight;
  py::object owner;
};

PyObject* Accumulated(PyObject* self, PyObject*) {
  const auto& hook = *static_cast<Hook*>(PyCapsule_GetPointer(self, nullptr));
  if (hook.watch->active) hook.watch->Timed([&] { hook.watch->Accumulated(hook.weight, hook.owner); });
  Py_RETURN_NONE;
}

PyMethodDef accumulated_definition = {"accumulated", Accumulated, METH_O,
                                      "Called when autograd has added to the gradient of the weight."};

py::object MakeHook(const py::object& watch, int64_t weight) {
  auto* found = watch.cast<GradientWatch*>();
  if (weight < 0 || weight >= found->num_weights()) throw py::value_error("there is no such weight");
  const py::capsule self(new Hook{found, weight, watch}, [](void* p) { delete static_cast<Hook*>(p); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&accumulated_definition, self.ptr()));
}

struct Lookup {
  GradientWatch* watch;
  int64_t weight;
  py::array_t<int64_t, py::array::c_style> rows;
  py::object owner;
};

// What a node of autograd calls when it has run: (gradients of its inputs, gradients of its outputs).
PyObject* LookedUp(PyObject* self, PyObject* args) {
  const auto& lookup = *static_cast<Lookup*>(PyCapsule_GetPointer(self, nullptr));
  PyObject* const made = PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : nullptr;
  if (lookup.watch->active && made != nullptr && PyTuple_Check(made) && PyTuple_GET_SIZE(made) == 1)
    lookup.watch->Timed([&] { lookup.watch->LookedUp(lookup.weight, PyTuple_GET_ITEM(made, 0), lookup.rows); });
  Py_RETURN_NONE;
}

PyMethodDef looked_up_definition = {"looked_up", LookedUp, METH_VARARGS,
                                    "Called when a lookup has made the gradient of its weight."};

py::object MakeLookupHook(const py::object& watch, int64_t weight, py::array_t<int64_t, py::array::c_style> rows) {
  auto* found = watch.cast<GradientWatch*>();
  if (weight < 0 || weight >= found->num_weights()) throw py::value_error("there is no such weight");
  const py::capsule self(new Lookup{found, weight, std::move(rows), watch},
                         [](void* p) { delete static_cast<Lookup*>(p); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&looked_up_definition, self.ptr()));
}

}  // namespace

void BindGradients(py::module_& m) {
  m.def("use_handles", &UseHandles);
  py::class_<GradientWatch>(m, "GradientWatch")
      .def(py::init<py::object, const std::vector<GradientWatch::WeightTuple>&, bool, py::object, py::object,
                    py::object, py::object, py::object, py::object>())
      .def_readwrite("active", &GradientWatch::active)
      .def_readwrite("num_threads", &GradientWatch::num_threads)
      .def_readwrite("seconds", &GradientWatch::seconds)
      .def_readonly("num_reads", &GradientWatch::num_reads)
      .def_readonly("num_row_reads", &GradientWatch::num_row_reads)
      .def_property_readonly("order", &GradientWatch::order)
      .def("hook", [](const py::object& self, int64_t weight) { return MakeHook(self, weight); })
      .def("lookup_hook", &MakeLookupHook)
      .def("settle", &GradientWatch::Settle)
      .def("read_rest", &GradientWatch::ReadRest)
      .def("read_all", &GradientWatch::ReadAll)
      .def("next_step", &GradientWatch::NextStep)
      .def("close", &GradientWatch::Close);
}

}  // namespace pyscan
