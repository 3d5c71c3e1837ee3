// The end of a plain step on the CPU in one call: its row taken, handed to the writer and glanced at, and everything
// made ready for the next one. Code that runs once in a step is in no cache, every function of Python takes
// microseconds there, and what it brings pushes out the training's: so a step of which there is nothing to say ends
// here. All of it is used under the GIL, which guards it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "bindings_observe.h"
#include "step_buffer.h"
#include "stopwatch.h"
#include "writer.h"

namespace pyscan {

class PlainStep {
 public:
  // (first cell, first cell it is copied from, number of cells): a tied weight has the gradient of another.
  using Ties = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

  // `pass_by` is given each row that needs no second look, as of TakeLast.
  PlainStep(pybind11::object buffer, pybind11::object capture, pybind11::object gradients, pybind11::object places,
            pybind11::object writer, pybind11::object glance, pybind11::object pass_by, Ties ties);

  // What the loop has said of a step.
  struct Figures {
    std::optional<double> loss;
    std::optional<uint64_t> tokens;
    std::optional<double> lr;
  };
  // What there is to say of a row: whether the writer took it, and what a glance at it has shown (None: nobody needs to
  // look again).
  struct News {
    bool is_taken;
    pybind11::object seen;
  };

  // Closes the row of a step, with watches that run since the closing and since the step began. Where there is more to
  // do, it says so, and the caller ends the step, whose time is left to it.
  std::optional<News> Close(const Stopwatch& closing, const Stopwatch& row, uint64_t step, const Figures& figures);

  // Ends a step that has no row, with watches as for Close; false if the caller has to end it.
  bool LeaveOut(const Stopwatch& closing, const Stopwatch& row);

  // Makes the hooks ready for the next step; true if the model has changed. Calling it twice is allowed.
  bool End();

  // The newest row that was closed here and has not been taken yet: (step, the bytes of its cells, tokens, loss, lr);
  // None if there is none.
  pybind11::object TakeLast();

  // Of the steps closed since the last call: seconds spent scanning, seconds of those of which there was nothing to
  // say, and the number of the latter.
  pybind11::tuple TakeFigures();

 private:
  void Count(const Stopwatch& closing, const Stopwatch& row);
  bool Write(uint64_t step, const Figures& figures, const double* row);

  StepBuffer* const buffer_;
  CaptureState* const capture_;
  GradientWatch* const gradients_;
  ModelPlaces* const places_;
  Writer* const writer_;
  RowGlance* const glance_;
  const pybind11::object pass_by_;
  const Ties ties_;
  const pybind11::object owners_[6];  // of all that is pointed to
  pybind11::object last_ = pybind11::none();
  double spent_ = 0, elapsed_ = 0;
  int64_t num_quiet_ = 0;
};

}  // namespace pyscan
