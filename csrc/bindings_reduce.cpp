#include "bindings.h"

namespace pyscan {

void BindReduce(pybind11::module_&) {}

}  // namespace pyscan
