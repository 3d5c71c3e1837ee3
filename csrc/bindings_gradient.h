// The gradient of a parameter. Asked for in Python, torch makes an object for every new gradient and lets it go again:
// between two products of a backward, when nothing of that is in a cache, 6 us, as long as to read 150 KB.
// The library exports C functions that answer the same about a handle, which is where a tensor's Python object holds
// it. Whether this torch has them, and whether they tell the same as Python, is tried out once; where not, Python is
// asked. Everything here needs the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings_tensor.h"

namespace pyscan {

// Whether handles may be used from now on: `parameter` is one that has a gradient, `make_handle` a function that
// returns a capsule with a new handle of a tensor, or None.
bool UseHandles(const pybind11::object& parameter, const pybind11::object& make_handle);

// As `VersionOf`, by the handle of a tensor where handles may be used, and then without an error.
long VersionByHandle(PyObject* x);

// Keeps the gradient alive that a parameter has when it is made.
class Gradient {
 public:
  // With `by_handle`, by its handle where handles may be used: the tensor must be none of a subclass.
  Gradient(const pybind11::object& parameter, bool by_handle);
  ~Gradient();
  Gradient(Gradient&& other) noexcept;

  bool is_none() const;
  // Counts the writes to it; -1 if there is none, and for one that counts none.
  long Version() const;
  // As `ViewOf`, without an error.
  bool View(TensorView* view) const;
  // As Python knows it.
  const pybind11::object& Object();

 private:
  pybind11::object parameter_;
  pybind11::object object_;  // null: by handle
  void* handle_ = nullptr;   // null with a null object: there is none
};

}  // namespace pyscan
