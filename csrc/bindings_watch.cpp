// What a scanner looks at when a step ends: the finished row, and whether the model is still the one it was.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "glance.h"

namespace py = pybind11;

namespace pyscan {
namespace {

using Doubles = py::array_t<double, py::array::c_style>;
using Integers = py::array_t<int64_t, py::array::c_style>;

void CheckSize(const char* name, int64_t size, int64_t wanted) {
  if (size != wanted)
    throw py::value_error(std::string(name) + " must hold " + std::to_string(wanted) + " values, got " +
                          std::to_string(size));
}

// (largest column, largest column of gradients, whether a count is above 0, whether a column is above its limit)
py::tuple GlanceAtRow(const Doubles& cells, const Integers& starts, int64_t num_blocks, int64_t num_bad,
                      const Doubles& limits, Doubles sums, Doubles tops, bool is_first) {
  const int64_t num_columns = starts.size();
  CheckSize("limits", limits.size(), num_columns);
  CheckSize("sums", sums.size(), num_columns);
  CheckSize("tops", tops.size(), num_blocks);
  if (num_blocks < 0 || num_bad < 0 || num_blocks + num_bad > cells.size())
    throw py::value_error("the row is shorter than its blocks and counts");
  int64_t last = 0;
  for (int64_t c = 0; c < num_columns; ++c) {
    if (starts.data()[c] < last || starts.data()[c] > num_blocks) throw py::value_error("starts must ascend");
    last = starts.data()[c];
  }
  const WatchedRow row{cells.data(), cells.size(), starts.data(), num_columns, num_blocks, num_bad};
  const Glance glance = GlanceAt(row, limits.data(), sums.mutable_data(), tops.mutable_data(), is_first);
  return py::make_tuple(glance.largest, glance.gradient, glance.has_bad, glance.is_above);
}

}  // namespace

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
  }

  bool Changed() const {
    for (const auto& [family, size] : families_)
      if (PyDict_Size(family.ptr()) != size) return true;
    for (const Place& place : entries_) {
      PyObject* now = PyDict_GetItemWithError(place.home.ptr(), place.key.ptr());
      if (now == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
      if (now != place.found.ptr()) return true;
    }
    for (const Place& place : attributes_) {
      const auto now = py::reinterpret_steal<py::object>(PyObject_GetAttr(place.home.ptr(), place.key.ptr()));
      if (!now) throw py::error_already_set();
      if (!now.is(place.found)) return true;
    }
    return false;
  }

 private:
  std::vector<std::pair<py::dict, Py_ssize_t>> families_;
  std::vector<Place> entries_, attributes_;
};

const ModelPlaces* ModelPlacesOf(const py::object& object) { return object.cast<const ModelPlaces*>(); }

bool HasChanged(const ModelPlaces& places) { return places.Changed(); }

void BindWatch(py::module_& m) {
  m.def("glance", &GlanceAtRow, py::arg().noconvert(), py::arg().noconvert(), py::arg(), py::arg(),
        py::arg().noconvert(), py::arg().noconvert(), py::arg().noconvert(), py::arg(), py::pos_only());
  py::class_<ModelPlaces>(m, "ModelPlaces")
      .def(py::init<const std::vector<py::dict>&, const ModelPlaces::Places&, const ModelPlaces::Places&>())
      .def("changed", &ModelPlaces::Changed);
}

}  // namespace pyscan
