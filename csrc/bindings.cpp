// The module pyscan._C. The bindings check arguments, release the GIL and translate errors; they compute nothing.

#include "bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled core of pyscan: the reduction, and the writer of .mscan files.";
  m.attr("version") = PYSCAN_VERSION;
  m.attr("compiler") = "C++ compiler " __VERSION__;
  pyscan::BindReduce(m);
  pyscan::BindObserve(m);
  pyscan::BindCall(m);
  pyscan::BindForward(m);
  pyscan::BindGradients(m);
  pyscan::BindWatch(m);
  pyscan::BindTokens(m);
  pyscan::BindWriter(m);
  pyscan::BindStep(m);
  pyscan::BindOptimizer(m);
}
