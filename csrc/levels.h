// How a window of rows in which nothing is peculiar moves the bounds of the watch. pyscan/levels.py says what levels
// and bounds are; this is the same for the plain window, because dozens of small array operations take half a
// millisecond between two training steps.
#pragma once

#include <cstdint>

namespace pyscan {

// Columns are the inputs of all sites and then their gradients.
struct LevelWindow {
  const double* sums;  // of squares, row by row
  int64_t num_rows, num_columns;
  const double* tops;  // the largest value of each block in the window
  int64_t num_blocks;
};

// What stays the same in a run.
struct LevelRules {
  const double* sizes;  // of each column
  const bool* own;      // a tied weight has the gradient of another
  double deviations;    // a spike is so many standard deviations above the mean,
  double spike_by;      // but at least so many levels
  double fade_by;       // a gradient so many levels below the highest one has faded; negative
};

// One value per column.
struct LevelBounds {
  const double* reference;
  const double* explode;
  double *mean, *variance, *spike;
  double* largest_sum;  // of squares that is below both bounds
};

// Takes in the window. False, and nothing has changed, if a value is 0 or not known, a column has no average yet, or a
// gradient has faded.
bool FollowPlain(const LevelWindow& window, const LevelRules& rules, const LevelBounds& bounds);

}  // namespace pyscan
