#include "glance.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pyscan {
namespace {

double LargestOrNan(const double* values, int64_t count) {
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(values[i])) return values[i];
    largest = std::max(largest, values[i]);
  }
  return largest;
}

}  // namespace

Glance GlanceAt(const WatchedRow& row, const double* limits, double* sums, double* tops, bool is_first) {
  Glance glance{};
  for (int64_t c = 0; c < row.num_columns; ++c) {
    const int64_t end = c + 1 < row.num_columns ? row.starts[c + 1] : row.num_blocks;
    double sum = 0;
    for (int64_t b = row.starts[c]; b < end; ++b) sum += row.cells[b];
    sums[c] = sum;
    glance.is_above |= sum > limits[c];
  }
  for (int64_t b = 0; b < row.num_blocks; ++b) {
    const double cell = row.cells[b];
    if (is_first || cell > tops[b] || std::isnan(cell)) tops[b] = cell;
  }
  const int64_t half = row.num_columns / 2;
  glance.gradient = LargestOrNan(sums + half, row.num_columns - half);
  glance.largest = LargestOrNan(sums, row.num_columns);
  for (int64_t i = row.num_cells - row.num_bad; i < row.num_cells; ++i) glance.has_bad |= row.cells[i] > 0;
  return glance;
}

}  // namespace pyscan
