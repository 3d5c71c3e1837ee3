#include "levels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace pyscan {
namespace {

// As in pyscan/levels.py.
constexpr double kLowestSum = 0x1p-999;  // what is 0 or not known is not above it
constexpr double kWeight = 0.5;
constexpr double kQuiet = 0.5;
constexpr double kFarBelow = 12.0;

bool IsPlain(const LevelWindow& window, const LevelBounds& bounds) {
  for (int64_t i = 0; i < window.num_rows * window.num_columns; ++i)
    if (!(window.sums[i] > kLowestSum)) return false;
  for (int64_t b = 0; b < window.num_blocks; ++b)
    if (window.tops[b] == 0) return false;
  for (int64_t c = 0; c < window.num_columns; ++c)
    if (std::isnan(bounds.mean[c]) || std::isnan(bounds.reference[c])) return false;
  return window.num_columns > 0;
}

// Whether the highest level of a gradient, which are the second half of the columns, is far below that of another.
bool HasFaded(const std::vector<double>& levels, const LevelWindow& window, const LevelRules& rules) {
  double highest = -std::numeric_limits<double>::infinity(), lowest = -highest;
  for (int64_t c = window.num_columns / 2; c < window.num_columns; ++c) {
    if (!rules.own[c]) continue;
    double top = levels[c];
    for (int64_t r = 1; r < window.num_rows; ++r) top = std::max(top, levels[r * window.num_columns + c]);
    highest = std::max(highest, top - rules.sizes[c]);
    lowest = std::min(lowest, top - rules.sizes[c]);
  }
  return lowest < highest + rules.fade_by;
}

// The median of mean - size over columns [begin, end).
double Usual(const LevelBounds& bounds, const LevelRules& rules, int64_t begin, int64_t end) {
  std::vector<double> relative;
  for (int64_t c = begin; c < end; ++c) relative.push_back(bounds.mean[c] - rules.sizes[c]);
  const auto middle = relative.begin() + (end - begin - 1) / 2;
  std::nth_element(relative.begin(), middle, relative.end());
  return *middle;
}

}  // namespace

bool FollowPlain(const LevelWindow& window, const LevelRules& rules, const LevelBounds& bounds) {
  if (!IsPlain(window, bounds)) return false;
  const int64_t num_columns = window.num_columns, half = num_columns / 2;
  std::vector<double> levels(window.sums, window.sums + window.num_rows * num_columns);
  for (double& level : levels) level = std::log2(level);
  if (HasFaded(levels, window, rules)) return false;
  for (int64_t c = 0; c < num_columns; ++c) {
    const double bound = std::min(bounds.explode[c], bounds.spike[c]);
    double sum = 0, squares = 0;
    for (int64_t r = 0; r < window.num_rows; ++r) sum += std::min(levels[r * num_columns + c], bound);
    const double mean = sum / double(window.num_rows);
    for (int64_t r = 0; r < window.num_rows; ++r) {
      const double off = std::min(levels[r * num_columns + c], bound) - mean;
      squares += off * off;
    }
    const double spread = squares / double(window.num_rows), moved = mean - bounds.mean[c];
    bounds.mean[c] += kWeight * moved;
    bounds.variance[c] = (1 - kWeight) * bounds.variance[c] + kWeight * (spread + moved * moved);
  }
  const double usual[2] = {Usual(bounds, rules, 0, half), Usual(bounds, rules, half, num_columns)};
  for (int64_t c = 0; c < num_columns; ++c) {
    const double deviation = std::sqrt(std::max(bounds.variance[c], kQuiet * kQuiet));
    const double far = std::max(rules.deviations * deviation, rules.spike_by);
    const double least = usual[c >= half] + rules.sizes[c] - kFarBelow;
    bounds.spike[c] = rules.own[c] ? std::max(bounds.mean[c] + far, least) : std::numeric_limits<double>::infinity();
    bounds.largest_sum[c] = std::exp2(std::min(bounds.explode[c], bounds.spike[c]));
  }
  return true;
}

}  // namespace pyscan
