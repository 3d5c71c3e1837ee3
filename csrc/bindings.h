// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

namespace pyscan {

void BindReduce(pybind11::module_& m);
void BindObserve(pybind11::module_& m);
void BindGradients(pybind11::module_& m);
void BindWatch(pybind11::module_& m);
void BindWriter(pybind11::module_& m);

}  // namespace pyscan
