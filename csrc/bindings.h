// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

namespace pyscan {

// What the end of a step asks of the parts, each defined with its part. The pointer is to what the object holds.
class GradientWatch;
GradientWatch* GradientWatchOf(const pybind11::object& object);
double EndStep(GradientWatch& watch);  // seconds spent in the step
class ModelPlaces;
const ModelPlaces* ModelPlacesOf(const pybind11::object& object);
bool HasChanged(const ModelPlaces& places);

void BindReduce(pybind11::module_& m);
void BindObserve(pybind11::module_& m);
void BindGradients(pybind11::module_& m);
void BindWatch(pybind11::module_& m);
void BindTokens(pybind11::module_& m);
void BindWriter(pybind11::module_& m);
void BindStep(pybind11::module_& m);

}  // namespace pyscan
