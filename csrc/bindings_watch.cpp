// What a scanner looks at when a step ends: the finished row, and whether the model is still the one it was.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

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

void CheckLengths(const py::list& a, const py::list& b) {
  if (PyList_GET_SIZE(a.ptr()) != PyList_GET_SIZE(b.ptr())) throw py::value_error("the lists must be of one length");
}

// Whether homes[i][keys[i]] is found[i], for every i.
bool AllInPlace(const py::list& homes, const py::list& keys, const py::list& found) {
  CheckLengths(homes, keys);
  CheckLengths(homes, found);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(homes.ptr()); ++i) {
    PyObject* now = PyDict_GetItemWithError(PyList_GET_ITEM(homes.ptr(), i), PyList_GET_ITEM(keys.ptr(), i));
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (now != PyList_GET_ITEM(found.ptr(), i)) return false;
  }
  return true;
}

int64_t NumEntries(const py::list& families) {
  int64_t count = 0;
  for (const py::handle family : families) {
    const Py_ssize_t size = PyDict_Size(family.ptr());
    if (size < 0) throw py::error_already_set();
    count += size;
  }
  return count;
}

// Whether the attribute of objects[i] is values[i], for every i.
bool AllHave(const py::list& objects, const py::str& attribute, const py::list& values) {
  CheckLengths(objects, values);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()); ++i) {
    PyObject* now = PyObject_GetAttr(PyList_GET_ITEM(objects.ptr(), i), attribute.ptr());
    if (now == nullptr) throw py::error_already_set();
    const bool is_same = now == PyList_GET_ITEM(values.ptr(), i);
    Py_DECREF(now);
    if (!is_same) return false;
  }
  return true;
}

}  // namespace

void BindWatch(py::module_& m) {
  m.def("glance", &GlanceAtRow, py::arg().noconvert(), py::arg().noconvert(), py::arg(), py::arg(),
        py::arg().noconvert(), py::arg().noconvert(), py::arg().noconvert(), py::arg(), py::pos_only());
  m.def("all_in_place", &AllInPlace);
  m.def("num_entries", &NumEntries);
  m.def("all_have", &AllHave);
}

}  // namespace pyscan
