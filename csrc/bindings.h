// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace pyscan {

// A name as Python's own code holds it: dicts and types find it by its address.
inline pybind11::object Name(const char* name) {
  return pybind11::reinterpret_steal<pybind11::object>(PyUnicode_InternFromString(name));
}

// Python counts the changes of all dicts in one number and never gives one twice: while a dict has its number, nothing
// in it is new, nothing gone, and the dict is no other. Python 3.12 gives the count up.
#if PY_VERSION_HEX < 0x030C0000
constexpr bool kCountsChanges = true;
inline uint64_t ChangesOf(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag; }
#else
constexpr bool kCountsChanges = false;
inline uint64_t ChangesOf(PyObject*) { return 0; }
#endif

// What the end of a step asks of the parts, each defined with its part. The pointer is to what the object holds.
class GradientWatch;
GradientWatch* GradientWatchOf(const pybind11::object& object);
double EndStep(GradientWatch& watch);  // seconds spent in the step
// Reads what the step has not read yet, if it reads at all; returns the weights that were read so late.
std::vector<int64_t> ReadRest(GradientWatch& watch);
class ModelPlaces;
ModelPlaces* ModelPlacesOf(const pybind11::object& object);
bool HasChanged(ModelPlaces& places);
class RowGlance;
RowGlance* RowGlanceOf(const pybind11::object& object);
// What a glance at the row has shown; None if nobody needs to look again. A loss that is not finite is a reason to.
pybind11::object SecondLook(RowGlance& rows, const double* cells, int64_t num_cells, uint64_t step,
                            bool is_loss_finite);

void BindReduce(pybind11::module_& m);
void BindObserve(pybind11::module_& m);
void BindCall(pybind11::module_& m);
void BindForward(pybind11::module_& m);
void BindGradients(pybind11::module_& m);
void BindWatch(pybind11::module_& m);
void BindTokens(pybind11::module_& m);
void BindWriter(pybind11::module_& m);
void BindStep(pybind11::module_& m);
void BindOptimizer(pybind11::module_& m);

}  // namespace pyscan
