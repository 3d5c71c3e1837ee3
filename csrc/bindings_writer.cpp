#include "bindings.h"

namespace pyscan {

void BindWriter(pybind11::module_&) {}

}  // namespace pyscan
