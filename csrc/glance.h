// The first look at a finished row: what the watch (pyscan/watch.py) must know of every row at once, from one read of
// it.
#pragma once

#include <cstdint>

namespace pyscan {

// A row as the watch sees it. Columns are the inputs of all sites and then their gradients; column c is the sum of the
// cells from starts[c] up to starts[c + 1] (the last one: num_blocks). The last num_bad cells count non-finite values.
struct WatchedRow {
  const double* cells;
  int64_t num_cells;
  const int64_t* starts;
  int64_t num_columns;
  int64_t num_blocks;
  int64_t num_bad;
};

struct Glance {
  double largest;   // of the columns; NaN if one is
  double gradient;  // of the columns of gradients; NaN if one is
  bool has_bad;     // a count is above 0
  bool is_above;    // a column is above its limit
};

// No second look is needed: nothing in the row sets off an alarm by itself.
inline bool IsQuiet(const Glance& glance) {
  return !glance.has_bad && !glance.is_above && !(glance.gradient <= 0 && glance.largest >= 0);
}

// Writes the columns to `sums`, and to `tops` the larger of it and the cell, for every block; with `is_first` the cell.
Glance GlanceAt(const WatchedRow& row, const double* limits, double* sums, double* tops, bool is_first);

}  // namespace pyscan
