// The end of a plain step on the CPU in two calls: its row taken and handed to the writer, then everything made ready
// for the next one. Code that runs once in a step is in no cache, and what it brings there pushes out the training's:
// so this is one piece instead of many.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bindings_observe.h"
#include "step_buffer.h"
#include "writer.h"

namespace py = pybind11;

namespace pyscan {
namespace {

// (first cell, first cell it is copied from, number of cells): a tied weight has the gradient of another.
using Ties = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

class PlainStep {
 public:
  PlainStep(py::object buffer, py::object capture, py::object gradients, py::object places, py::object writer,
            Ties ties)
      : buffer_(buffer.cast<StepBuffer*>()),
        capture_(capture.cast<CaptureState*>()),
        gradients_(GradientWatchOf(gradients)),
        places_(ModelPlacesOf(places)),
        writer_(writer.is_none() ? nullptr : writer.cast<Writer*>()),
        ties_(std::move(ties)),
        owners_{buffer, capture, gradients, places, writer} {
    for (const auto& [to, from, count] : ties_)
      if (std::min(to, from) < 0 || count < 0 || std::max(to, from) + count > buffer_->num_cells())
        throw py::value_error("a tie lies outside the row");
  }

  // The cells of the finished row, and whether the writer took them.
  py::tuple Row(uint64_t step, std::optional<uint64_t> tokens, std::optional<double> loss, std::optional<double> lr) {
    py::array_t<double> cells(buffer_->num_cells());
    double* const row = cells.mutable_data();
    buffer_->Take(1.0, row);
    for (const auto& [to, from, count] : ties_) std::copy_n(row + from, count, row + to);
    return py::make_tuple(std::move(cells), writer_ == nullptr || Write(step, tokens, loss, lr, row));
  }

  // Seconds that the hooks of this step took, and whether the model has changed.
  py::tuple End() {
    const double seconds = EndStep(*capture_) + EndStep(*gradients_);
    return py::make_tuple(seconds, HasChanged(*places_));
  }

 private:
  bool Write(uint64_t step, std::optional<uint64_t> tokens, std::optional<double> loss, std::optional<double> lr,
             const double* row) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    RowRecord record{};
    record.step = step;
    record.time_ns = uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
    record.tokens = tokens.value_or(0);
    record.loss = float(loss.value_or(0.0));
    record.lr = float(lr.value_or(0.0));
    record.flags = (tokens ? kRowHasTokens : 0) | (loss ? kRowHasLoss : 0) | (lr ? kRowHasLr : 0);
    const uint64_t num_cells = buffer_->num_cells();
    const Writer::Handover handover = writer_->TryWrite(record, row, num_cells);
    if (handover != Writer::Handover::kBusy) return handover == Writer::Handover::kAccepted;
    const py::gil_scoped_release release;
    return writer_->Write(record, row, num_cells);
  }

  StepBuffer* const buffer_;
  CaptureState* const capture_;
  GradientWatch* const gradients_;
  const ModelPlaces* const places_;
  Writer* const writer_;
  const Ties ties_;
  const py::object owners_[5];  // of all that is pointed to
};

}  // namespace

void BindStep(py::module_& m) {
  py::class_<PlainStep>(m, "PlainStep")
      .def(py::init<py::object, py::object, py::object, py::object, py::object, Ties>())
      .def("row", &PlainStep::Row)
      .def("end", &PlainStep::End);
}

}  // namespace pyscan
