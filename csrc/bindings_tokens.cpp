// Row sums as tokens mode asks for them: a plain tensor is read where it is, every other goes back to Python.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings.h"
#include "bindings_tensor.h"
#include "row_norms.h"

namespace py = pybind11;

namespace pyscan {
namespace {

// Below this a tensor is read faster than another thread could take the GIL.
constexpr int64_t kReleaseBytes = int64_t{1} << 16;

py::array_t<double> Sum(const Matrix& x, int64_t block, bool per_block, int num_threads) {
  if (block < 0) throw py::value_error("block must be >= 0, got " + std::to_string(block));
  const int64_t width = per_block && block == 0 ? std::max<int64_t>(x.cols, 1) : block;
  std::vector<py::ssize_t> shape{x.rows};
  if (per_block) shape.push_back(RowBlocks(x, width));
  py::array_t<double> sums(shape);
  double* const out = sums.mutable_data();
  if (x.rows * x.cols * ElementBytes(x.dtype) < kReleaseBytes) {
    RowSums(x, per_block ? width : 0, 1, out);
  } else {
    const py::gil_scoped_release release;
    RowSums(x, per_block ? width : 0, num_threads, out);
  }
  return sums;
}

// None unless the tensor is plain: contiguous, on the CPU, of one of the engine's dtypes.
py::object SumTensor(py::handle x, int64_t num_features, int64_t block, bool per_block, int num_threads) {
  if (!HasTorch()) throw std::runtime_error("use_torch must be called first");
  TensorView view;
  const bool is_plain = num_features > 0 && ViewOf(x.ptr(), &view) && view.is_contiguous && view.data != nullptr &&
                        view.numel % num_features == 0;
  PyErr_Clear();  // what has no view is not plain
  if (!is_plain) return py::none();
  const Matrix matrix{view.data, view.dtype, view.numel / num_features, num_features, num_features, 1};
  return Sum(matrix, block, per_block, num_threads);
}

py::array_t<double> SumMatrix(uintptr_t address, int dtype, int64_t rows, int64_t cols, int64_t row_stride,
                              int64_t col_stride, int64_t block, bool per_block, int num_threads) {
  if (dtype < 0 || dtype > 3) throw py::value_error("dtype must be 0 to 3, got " + std::to_string(dtype));
  if (rows < 0 || cols < 0) throw py::value_error("rows and cols must be >= 0");
  if (address == 0 && rows > 0 && cols > 0) throw py::value_error("address is null");
  const Matrix x{reinterpret_cast<const void*>(address), static_cast<DType>(dtype), rows, cols, row_stride, col_stride};
  return Sum(x, block, per_block, num_threads);
}

}  // namespace

void BindTokens(py::module_& m) {
  m.def("row_sums", &SumTensor);
  m.def("row_sums_of", &SumMatrix);
}

}  // namespace pyscan
