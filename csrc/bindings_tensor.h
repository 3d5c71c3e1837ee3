// What the bindings ask of a torch tensor, without torch's headers: its C table for exchanging tensors (DLPack) answers
// in nanoseconds; where a torch has none, its Python attributes do. Everything here needs the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "reduce.h"

namespace pyscan {

struct TensorView {
  const void* data;
  DType dtype;
  int64_t numel;
  bool is_contiguous;
};

// Tells the functions below where things are in torch; the last call counts. `exchange_api` is the capsule
// torch.Tensor.__dlpack_c_exchange_api__, or None. With `is_native` what torch's libraries export is asked before
// Python.
void UseTorch(pybind11::object tensor_type, pybind11::object is_grad_enabled, pybind11::object graph_task_id,
              pybind11::object tracing_state, const pybind11::tuple& dtypes, pybind11::object exchange_api,
              bool is_native);
bool HasTorch();

// True if `x` is exactly a torch.Tensor.
bool IsTensor(PyObject* x);
// False, perhaps with an error set, unless `x` is exactly a torch.Tensor in memory of the CPU, strided, of one of the
// engine's dtypes.
bool ViewOf(PyObject* x, TensorView* view);
// How many integers `x` holds. False, perhaps with an error set, unless it is exactly a torch.Tensor of them with at
// least one dimension, on whatever device.
bool NumIntegers(PyObject* x, int64_t* number);
// The gradient of a parameter; None if it has none.
pybind11::object GradientOf(const pybind11::object& parameter);
// Counts the writes to a tensor; -1 with an error set if it counts none.
long VersionOf(PyObject* x);
bool IsGradEnabled();
bool IsTracing();
// The backward that runs in this thread; -1 outside one.
int64_t GraphTask();

}  // namespace pyscan
