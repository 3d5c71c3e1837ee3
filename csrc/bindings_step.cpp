// The end of a plain step on the CPU in one call: its row taken, handed to the writer and glanced at, and everything
// made ready for the next one. Code that runs once in a step is in no cache, every function of Python takes
// microseconds there, and what it brings pushes out the training's: so a step of which there is nothing to say ends
// here.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
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

// At the latest after so many steps of which there was nothing to say the caller is told of one, to count them.
constexpr int64_t kMostQuiet = 31;

// As time.perf_counter.
double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class PlainStep {
 public:
  // `pass_by` is given each row that needs no second look, as of TakeLast.
  PlainStep(py::object buffer, py::object capture, py::object gradients, py::object places, py::object writer,
            py::object glance, py::object pass_by, Ties ties)
      : buffer_(buffer.cast<StepBuffer*>()),
        capture_(capture.cast<CaptureState*>()),
        gradients_(GradientWatchOf(gradients)),
        places_(ModelPlacesOf(places)),
        writer_(writer.is_none() ? nullptr : writer.cast<Writer*>()),
        glance_(glance.is_none() ? nullptr : RowGlanceOf(glance)),
        pass_by_(std::move(pass_by)),
        ties_(std::move(ties)),
        owners_{buffer, capture, gradients, places, writer, glance} {
    for (const auto& [to, from, count] : ties_)
      if (std::min(to, from) < 0 || count < 0 || std::max(to, from) + count > buffer_->num_cells())
        throw py::value_error("a tie lies outside the row");
  }

  // Closes the row of a step that began at `row_start`; closing it began at `start` (by time.perf_counter). None, or
  // where there is more to do: whether the writer took the row, and what a glance at it has shown (None: nobody needs
  // to look again). The caller then ends the step, whose time is left to it.
  py::object Close(double start, double row_start, uint64_t step, std::optional<double> loss,
                   std::optional<uint64_t> tokens, std::optional<double> lr) {
    // Not an array: making one would add 10 us to 40.
    auto cells = py::reinterpret_steal<py::bytearray>(
        PyByteArray_FromStringAndSize(nullptr, buffer_->num_cells() * Py_ssize_t(sizeof(double))));
    if (!cells) throw py::error_already_set();
    auto* const row = reinterpret_cast<double*>(PyByteArray_AS_STRING(cells.ptr()));
    buffer_->Take(1.0, row);
    for (const auto& [to, from, count] : ties_) std::copy_n(row + from, count, row + to);
    const bool is_taken = writer_ == nullptr || Write(step, tokens, loss, lr, row);
    py::object seen = py::none();
    if (glance_ != nullptr) seen = SecondLook(*glance_, row, buffer_->num_cells(), step, !loss || std::isfinite(*loss));
    last_ = py::make_tuple(step, std::move(cells), tokens, loss, lr);
    if (seen.is_none() && !pass_by_.is_none()) pass_by_(last_);
    const bool is_quiet = writer_ != nullptr && is_taken && seen.is_none() && num_quiet_ < kMostQuiet;
    if (!is_quiet || End()) return py::make_tuple(is_taken, std::move(seen));
    Count(start, row_start);
    return py::none();
  }

  // Ends a step that has no row, with times as for Close; false if the caller has to end it.
  bool LeaveOut(double start, double row_start) {
    if (num_quiet_ >= kMostQuiet || End()) return false;
    Count(start, row_start);
    return true;
  }

  // Makes the hooks ready for the next step; true if the model has changed. Calling it twice is allowed.
  bool End() {
    spent_ += EndStep(*capture_) + EndStep(*gradients_);
    return HasChanged(*places_);
  }

  // The newest row that was closed here and has not been taken yet: (step, the bytes of its cells, tokens, loss, lr);
  // None if there is none.
  py::object TakeLast() { return std::exchange(last_, py::none()); }

  // Of the steps closed since the last call: seconds spent scanning, seconds of those of which there was nothing to
  // say, and the number of the latter.
  py::tuple TakeFigures() {
    return py::make_tuple(std::exchange(spent_, 0.0), std::exchange(elapsed_, 0.0), std::exchange(num_quiet_, 0));
  }

 private:
  // A step of which there is nothing to say has ended.
  void Count(double start, double row_start) {
    const double now = Seconds();
    spent_ += now - start;
    elapsed_ += now - row_start;
    ++num_quiet_;
  }

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
  ModelPlaces* const places_;
  Writer* const writer_;
  RowGlance* const glance_;
  const py::object pass_by_;
  const Ties ties_;
  const py::object owners_[6];  // of all that is pointed to
  py::object last_ = py::none();
  double spent_ = 0, elapsed_ = 0;
  int64_t num_quiet_ = 0;
};

}  // namespace

void BindStep(py::module_& m) {
  py::class_<PlainStep>(m, "PlainStep")
      .def(py::init<py::object, py::object, py::object, py::object, py::object, py::object, py::object, Ties>())
      .def("close", &PlainStep::Close)
      .def("leave_out", &PlainStep::LeaveOut)
      .def("end", &PlainStep::End)
      .def("take_last", &PlainStep::TakeLast)
      .def("take_figures", &PlainStep::TakeFigures);
}

}  // namespace pyscan
