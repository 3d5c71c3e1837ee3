// What a scanner looks at when a step ends: the finished row, and whether the model is still the one it was.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "glance.h"
#include "levels.h"

namespace py = pybind11;

namespace pyscan {
namespace {

using Doubles = py::array_t<double, py::array::c_style>;
using Integers = py::array_t<int64_t, py::array::c_style>;
using Booleans = py::array_t<bool, py::array::c_style>;

void CheckSize(const char* name, int64_t size, int64_t wanted) {
  if (size != wanted)
    throw py::value_error(std::string(name) + " must hold " + std::to_string(wanted) + " values, got " +
                          std::to_string(size));
}

}  // namespace

// Looks at each finished row once. Levels are reviewed at the end of every window of rows, and after the first ones.
class RowGlance {
 public:
  RowGlance(Integers starts, int64_t num_blocks, int64_t num_bad, int64_t window_rows, int64_t first_rows)
      : starts_(std::move(starts)),
        num_blocks_(num_blocks),
        num_bad_(num_bad),
        window_rows_(window_rows),
        first_rows_(first_rows),
        window_(std::vector<int64_t>{window_rows, starts_.size()}),
        tops_(std::max<int64_t>(num_blocks, 0)),
        limits_(starts_.size()) {
    if (num_blocks < 0 || num_bad < 0 || window_rows < 1) throw py::value_error("sizes must not be negative");
    int64_t last = 0;
    for (int64_t c = 0; c < starts_.size(); ++c) {
      if (starts_.data()[c] < last || starts_.data()[c] > num_blocks) throw py::value_error("starts must ascend");
      last = starts_.data()[c];
    }
    std::fill_n(window_.mutable_data(), window_.size(), 0.0);
    std::fill_n(tops_.mutable_data(), tops_.size(), 0.0);
    std::fill_n(limits_.mutable_data(), limits_.size(), std::numeric_limits<double>::infinity());
  }

  void SetLimits(Doubles limits) {
    CheckSize("limits", limits.size(), starts_.size());
    limits_ = std::move(limits);
  }

  Glance Look(const double* cells, int64_t num_cells, uint64_t step) {
    if (num_blocks_ + num_bad_ > num_cells) throw py::value_error("the row is shorter than its blocks and counts");
    const int64_t place = num_rows_++ % window_rows_;
    if (place == 0) window_step_ = step;
    const WatchedRow row{cells, num_cells, starts_.data(), starts_.size(), num_blocks_, num_bad_};
    double* const sums = window_.mutable_data() + place * starts_.size();
    return GlanceAt(row, limits_.data(), sums, tops_.mutable_data(), place == 0);
  }

  // Takes the window that has just ended into the bounds and the limits; false, and nothing has changed, if it is not
  // plain.
  bool Follow(const Doubles& reference, const Doubles& explode, Doubles& mean, Doubles& variance, Doubles& spike,
              const Doubles& sizes, const Booleans& own, double deviations, double spike_by, double fade_by) {
    const int64_t num_columns = starts_.size();
    for (const py::array& one : {reference, explode, mean, variance, spike, sizes})
      CheckSize("bounds", one.size(), num_columns);
    CheckSize("own", own.size(), num_columns);
    const LevelWindow window{window_.data(), window_rows_, num_columns, tops_.data(), num_blocks_};
    const LevelRules rules{sizes.data(), own.data(), deviations, spike_by, fade_by};
    return FollowPlain(window, rules,
                       {reference.data(), explode.data(), mean.mutable_data(), variance.mutable_data(),
                        spike.mutable_data(), limits_.mutable_data()});
  }

  // Whether something is due after the row that was looked at last, whatever is in it.
  bool IsDue() const { return num_rows_ % window_rows_ == 0 || num_rows_ == first_rows_; }

  const Doubles& window() const { return window_; }
  const Doubles& tops() const { return tops_; }
  const Doubles& limits() const { return limits_; }
  int64_t num_rows() const { return num_rows_; }
  uint64_t window_step() const { return window_step_; }

 private:
  const Integers starts_;
  const int64_t num_blocks_, num_bad_, window_rows_, first_rows_;
  Doubles window_, tops_, limits_;
  int64_t num_rows_ = 0;
  uint64_t window_step_ = 0;  // of the window's first row
};

namespace {

py::tuple ToTuple(const Glance& glance) {
  return py::make_tuple(glance.largest, glance.gradient, glance.has_bad, glance.is_above);
}

}  // namespace

RowGlance* RowGlanceOf(const py::object& object) { return object.cast<RowGlance*>(); }

py::object SecondLook(RowGlance& rows, const double* cells, int64_t num_cells, uint64_t step, bool is_loss_finite) {
  const Glance glance = rows.Look(cells, num_cells, step);
  if (is_loss_finite && IsQuiet(glance) && !rows.IsDue()) return py::none();
  return ToTuple(glance);
}

// Where things were found in a model: dicts with the number of their entries, entries of dicts, attributes of objects.
class ModelPlaces {
 public:
  struct Place {
    py::object home, key, found;
  };
  using Places = std::vector<std::tuple<py::object, py::object, py::object>>;

  ModelPlaces(const std::vector<py::dict>& families, const Places& entries, const Places& attributes) {
    for (const py::dict& family : families) families_.emplace_back(family, PyDict_Size(family.ptr()));
    for (const auto& [home, key, found] : entries) {
      if (!PyDict_Check(home.ptr())) throw py::type_error("entries are of dicts");
      entries_.push_back({home, key, found});
    }
    for (const auto& [home, key, found] : attributes) attributes_.push_back({home, key, found});
    std::set<PyObject*> dicts;
    for (const py::dict& family : families) dicts.insert(family.ptr());
    for (const Place& place : entries_) dicts.insert(place.home.ptr());
    for (PyObject* dict : dicts) counts_.emplace_back(dict, 0);
  }

  bool Changed() {
    if (HaveDictsChanged()) {
      if (Look()) return true;
      for (auto& [dict, changes] : counts_) changes = ChangesOf(dict);
    }
    for (const Place& place : attributes_) {
      const auto now = py::reinterpret_steal<py::object>(PyObject_GetAttr(place.home.ptr(), place.key.ptr()));
      if (!now) throw py::error_already_set();
      if (!now.is(place.found)) return true;
    }
    return false;
  }

 private:
  bool HaveDictsChanged() const {
    if (!kCountsChanges) return true;
    for (const auto& [dict, changes] : counts_)
      if (ChangesOf(dict) != changes) return true;
    return false;
  }

  // True if a dict has another number of entries, or another entry.
  bool Look() const {
    for (const auto& [family, size] : families_)
      if (PyDict_Size(family.ptr()) != size) return true;
    for (const Place& place : entries_) {
      PyObject* now = PyDict_GetItemWithError(place.home.ptr(), place.key.ptr());
      if (now == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
      if (now != place.found.ptr()) return true;
    }
    return false;
  }

  std::vector<std::pair<py::dict, Py_ssize_t>> families_;
  std::vector<Place> entries_, attributes_;
  std::vector<std::pair<PyObject*, uint64_t>> counts_;  // of every dict among them, as of when it was last looked into
};

ModelPlaces* ModelPlacesOf(const py::object& object) { return object.cast<ModelPlaces*>(); }

bool HasChanged(ModelPlaces& places) { return places.Changed(); }

void BindWatch(py::module_& m) {
  py::class_<RowGlance>(m, "Glance")
      .def(py::init<Integers, int64_t, int64_t, int64_t, int64_t>())
      .def_property_readonly("window", &RowGlance::window)
      .def_property_readonly("tops", &RowGlance::tops)
      .def_property("limits", &RowGlance::limits, &RowGlance::SetLimits)
      .def_property_readonly("num_rows", &RowGlance::num_rows)
      .def_property_readonly("window_step", &RowGlance::window_step)
      .def("follow", &RowGlance::Follow, py::arg("reference").noconvert(), py::arg("explode").noconvert(),
           py::arg("mean").noconvert(), py::arg("variance").noconvert(), py::arg("spike").noconvert(),
           py::arg("sizes").noconvert(), py::arg("own").noconvert(), py::arg("deviations"), py::arg("spike_by"),
           py::arg("fade_by"))
      .def("look", [](RowGlance& rows, const Doubles& cells, uint64_t step) {
        return ToTuple(rows.Look(cells.data(), cells.size(), step));
      });
  py::class_<ModelPlaces>(m, "ModelPlaces")
      .def(py::init<const std::vector<py::dict>&, const ModelPlaces::Places&, const ModelPlaces::Places&>())
      .def("changed", &ModelPlaces::Changed);
}

}  // namespace pyscan
