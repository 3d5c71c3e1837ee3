// The reduction as Python sees it: addresses, shapes and strides in; results into arrays the caller owns.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "reduce.h"
#include "step_buffer.h"
#include "thread_pool.h"

namespace py = pybind11;

namespace pyscan {
namespace {

using Doubles = py::array_t<double, py::array::c_style>;

Isa IsaOf(const py::object& isa) { return isa.is_none() ? ActiveIsa() : ParseIsa(isa.cast<std::string>().c_str()); }

void CheckSize(const char* name, const Doubles& array, int64_t wanted) {
  if (array.size() != wanted)
    throw py::value_error(std::string(name) + " must have " + std::to_string(wanted) + " values, got " +
                          std::to_string(array.size()));
}

double* DataOrNull(std::optional<Doubles>& array) { return array ? array->mutable_data() : nullptr; }

void ReduceInto(uintptr_t address, int dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,
                Doubles sumsq, Doubles absmax, Doubles bad, int64_t block, int64_t first, bool by_rows,
                std::optional<Doubles> row_sumsq, int num_threads, const py::object& isa) {
  if (dtype < 0 || dtype > 3) throw py::value_error("dtype must be 0 to 3, got " + std::to_string(dtype));
  if (rows < 0 || cols < 0) throw py::value_error("rows and cols must be >= 0");
  if (block < 1) throw py::value_error("block must be >= 1, got " + std::to_string(block));
  if (first < 0 || first >= block) throw py::value_error("first must lie in [0, block), got " + std::to_string(first));
  if (address == 0 && rows > 0 && cols > 0) throw py::value_error("address is null");
  const Matrix x{reinterpret_cast<const void*>(address), static_cast<DType>(dtype), rows, cols, row_stride, col_stride};
  const Blocks blocks{by_rows ? Blocks::Axis::kRows : Blocks::Axis::kColumns, block, first};
  const int64_t num_blocks = NumBlocks(x, blocks);
  const bool fold = absmax.size() == 1 && num_blocks != 1;
  CheckSize("sumsq", sumsq, num_blocks);
  CheckSize("absmax", absmax, fold ? 1 : num_blocks);
  CheckSize("bad", bad, fold ? 1 : num_blocks);
  bool row_blocks = false;
  if (row_sumsq) {
    row_blocks = row_sumsq->ndim() == 2;
    if (row_blocks && by_rows) throw py::value_error("row_sumsq per block goes with column blocks");
    CheckSize("row_sumsq", *row_sumsq, row_blocks ? rows * num_blocks : rows);
  }
  const ReduceOutput out{
      sumsq.mutable_data(), absmax.mutable_data(), bad.mutable_data(), fold, DataOrNull(row_sumsq), row_blocks};
  const Isa chosen = IsaOf(isa);
  const py::gil_scoped_release release;
  Reduce(x, blocks, out, num_threads, chosen);
}

// What a hook hands over: nothing is checked twice on this path, the slots were checked when the buffer was made.
Matrix MatrixOf(uintptr_t address, int dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  return {reinterpret_cast<const void*>(address), static_cast<DType>(dtype), rows, cols, row_stride, col_stride};
}

// (block, first, by_rows, num_blocks, sumsq_cell, absmax_cell, bad_cell, is_gradient)
using SlotTuple = std::tuple<int64_t, int64_t, bool, int64_t, int64_t, int64_t, int64_t, bool>;

std::unique_ptr<StepBuffer> MakeStepBuffer(int64_t num_cells, const std::vector<SlotTuple>& tuples) {
  std::vector<Slot> slots;
  slots.reserve(tuples.size());
  for (const auto& [block, first, by_rows, num_blocks, sumsq, absmax, bad, is_gradient] : tuples) {
    if (block < 1 || first < 0 || first >= block) throw py::value_error("a slot has block < 1 or first outside it");
    const Blocks blocks{by_rows ? Blocks::Axis::kRows : Blocks::Axis::kColumns, block, first};
    slots.push_back({blocks, num_blocks, sumsq, absmax, bad, is_gradient});
  }
  return std::make_unique<StepBuffer>(num_cells, std::move(slots));
}

void BindStepBuffer(py::module_& m) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<StepBuffer>(m, "StepBuffer")
      .def(py::init(&MakeStepBuffer), py::arg("num_cells"), py::arg("slots"))
      .def_property_readonly("num_cells", &StepBuffer::num_cells)
      .def_property_readonly("num_slots", &StepBuffer::num_slots)
      .def(
          "add",
          [](StepBuffer& self, int64_t slot, uintptr_t address, int dtype, int64_t rows, int64_t cols,
             int64_t row_stride, int64_t col_stride, int num_threads) {
            self.Add(slot, MatrixOf(address, dtype, rows, cols, row_stride, col_stride), num_threads);
          },
          release)
      .def(
          "set",
          [](StepBuffer& self, int64_t slot, uintptr_t address, int dtype, int64_t rows, int64_t cols,
             int64_t row_stride, int64_t col_stride, int num_threads) {
            self.Set(slot, MatrixOf(address, dtype, rows, cols, row_stride, col_stride), num_threads);
          },
          release)
      .def("add_ranges",
           [](StepBuffer& self, int64_t first_slot, uintptr_t address, int dtype, int64_t rows, int64_t cols,
              int64_t row_stride, int64_t col_stride, py::array_t<int32_t, py::array::c_style> ends, int num_threads) {
             const Matrix x = MatrixOf(address, dtype, rows, cols, row_stride, col_stride);
             const int32_t* data = ends.data();
             const int64_t count = ends.size();
             const py::gil_scoped_release free;
             self.AddRanges(first_slot, x, data, count, num_threads);
           })
      .def(
          "take",
          [](StepBuffer& self, double grad_scale, Doubles row) {
            CheckSize("row", row, self.num_cells());
            self.Take(grad_scale, row.mutable_data());
          },
          py::arg("grad_scale"), py::arg("row").noconvert());
}

}  // namespace

void BindReduce(py::module_& m) {
  BindStepBuffer(m);
  m.attr("isa") = IsaName(ActiveIsa());
  py::list isas;
  for (const Isa isa : Isas()) isas.append(IsaName(isa));
  m.attr("isas") = py::tuple(isas);
  m.def("borrow_threads", [](uintptr_t gomp_parallel, uintptr_t omp_get_thread_num) {
    ThreadPool::Instance();  // registers what a fork needs
    ThreadPool::Borrow(reinterpret_cast<ThreadPool::ParallelFn>(gomp_parallel),
                       reinterpret_cast<ThreadPool::NumberFn>(omp_get_thread_num));
  });
  m.def("reduce_into", &ReduceInto, py::arg("address"), py::arg("dtype"), py::arg("rows"), py::arg("cols"),
        py::arg("row_stride"), py::arg("col_stride"), py::arg("sumsq").noconvert(), py::arg("absmax").noconvert(),
        py::arg("bad").noconvert(), py::kw_only(), py::arg("block"), py::arg("first") = 0, py::arg("by_rows") = false,
        py::arg("row_sumsq") = py::none(), py::arg("num_threads") = 1, py::arg("isa") = py::none());
}

}  // namespace pyscan
