#include "bindings_step.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace py = pybind11;

namespace pyscan {
namespace {

// At the latest after so many steps of which there was nothing to say the caller is told of one, to count them.
constexpr int64_t kMostQuiet = 31;

}  // namespace

PlainStep::PlainStep(py::object buffer, py::object capture, py::object gradients, py::object places, py::object writer,
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

std::optional<PlainStep::News> PlainStep::Close(const Stopwatch& closing, const Stopwatch& row, uint64_t step,
                                                const Figures& figures) {
  // Not an array: making one would add 10 us to 40.
  auto cells = py::reinterpret_steal<py::bytearray>(
      PyByteArray_FromStringAndSize(nullptr, buffer_->num_cells() * Py_ssize_t(sizeof(double))));
  if (!cells) throw py::error_already_set();
  auto* const values = reinterpret_cast<double*>(PyByteArray_AS_STRING(cells.ptr()));
  buffer_->Take(1.0, values);
  for (const auto& [to, from, count] : ties_) std::copy_n(values + from, count, values + to);
  const bool is_taken = writer_ == nullptr || Write(step, figures, values);
  const bool is_loss_finite = !figures.loss || std::isfinite(*figures.loss);
  py::object seen = py::none();
  if (glance_ != nullptr) seen = SecondLook(*glance_, values, buffer_->num_cells(), step, is_loss_finite);
  last_ = py::make_tuple(step, std::move(cells), figures.tokens, figures.loss, figures.lr);
  if (seen.is_none() && !pass_by_.is_none()) pass_by_(last_);
  const bool is_quiet = writer_ != nullptr && is_taken && seen.is_none() && num_quiet_ < kMostQuiet;
  if (!is_quiet || End()) return News{is_taken, std::move(seen)};
  Count(closing, row);
  return std::nullopt;
}

bool PlainStep::LeaveOut(const Stopwatch& closing, const Stopwatch& row) {
  if (num_quiet_ >= kMostQuiet || End()) return false;
  Count(closing, row);
  return true;
}

bool PlainStep::End() {
  spent_ += EndStep(*capture_) + EndStep(*gradients_);
  return HasChanged(*places_);
}

py::object PlainStep::TakeLast() { return std::exchange(last_, py::none()); }

py::tuple PlainStep::TakeFigures() {
  return py::make_tuple(std::exchange(spent_, 0.0), std::exchange(elapsed_, 0.0), std::exchange(num_quiet_, 0));
}

// A step of which there is nothing to say has ended.
void PlainStep::Count(const Stopwatch& closing, const Stopwatch& row) {
  spent_ += closing.Seconds();
  elapsed_ += row.Seconds();
  ++num_quiet_;
}

bool PlainStep::Write(uint64_t step, const Figures& figures, const double* row) {
  const auto& [loss, tokens, lr] = figures;
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

void BindStep(py::module_& m) {
  py::class_<PlainStep>(m, "PlainStep")
      .def(py::init<py::object, py::object, py::object, py::object, py::object, py::object, py::object,
                    PlainStep::Ties>())
      .def("end", &PlainStep::End)
      .def("take_last", &PlainStep::TakeLast)
      .def("take_figures", &PlainStep::TakeFigures);
}

}  // namespace pyscan
