#include "step_buffer.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "row_norms.h"
#include "thread_pool.h"

namespace pyscan {

StepBuffer::StepBuffer(int64_t num_cells, std::vector<Slot> slots)
    : num_cells_(num_cells),
      slots_(std::move(slots)),
      row_(num_cells, 0.0),
      bad_(slots_.size(), 0.0),
      seen_(slots_.size(), 0) {
  for (const Slot& slot : slots_) {
    const bool inside = slot.sumsq_cell >= 0 && slot.num_blocks >= 0 &&
                        slot.sumsq_cell + slot.num_blocks <= num_cells && slot.absmax_cell < num_cells &&
                        slot.bad_cell < num_cells;
    if (!inside) throw std::invalid_argument("a slot has cells outside the row of " + std::to_string(num_cells));
  }
}

const Slot& StepBuffer::At(int64_t slot) const {
  if (slot < 0 || slot >= num_slots()) throw std::invalid_argument("there is no slot " + std::to_string(slot));
  return slots_[slot];
}

StepBuffer::Sums& StepBuffer::LastAdded() {
  thread_local Sums sums;
  return sums;
}

StepBuffer::Sums& StepBuffer::LastSet() {
  thread_local Sums sums;
  return sums;
}

void StepBuffer::CheckBlocks(const Slot& slot, const Matrix& x) const {
  if (x.data == nullptr && x.rows > 0 && x.cols > 0) throw std::invalid_argument("the matrix has no address");
  const int64_t num_blocks = NumBlocks(x, slot.blocks);
  if (num_blocks != slot.num_blocks)
    throw std::invalid_argument("a matrix of " + std::to_string(num_blocks) + " blocks came for a slot of " +
                                std::to_string(slot.num_blocks));
}

void StepBuffer::Read(const Slot& slot, const Matrix& x, int num_threads, Sums* sums, double* row_sums) const {
  for (std::vector<double>* values : {&sums->sumsq, &sums->absmax, &sums->bad}) values->assign(slot.num_blocks, 0.0);
  if (row_sums != nullptr) std::fill_n(row_sums, x.rows, 0.0);
  const ReduceOutput out{sums->sumsq.data(), sums->absmax.data(), sums->bad.data(), false, row_sums, false};
  Reduce(x, slot.blocks, out, num_threads, ActiveIsa());
  const auto is_bad = [](double count) { return count > 0; };
  if (row_sums != nullptr && std::any_of(sums->bad.begin(), sums->bad.end(), is_bad)) MarkBadRows(x, 0, row_sums);
}

void StepBuffer::Merge(int64_t index, const Sums& sums) {
  const Slot& slot = slots_[index];
  double* const row = row_.data() + slot.sumsq_cell;
  if (!seen_[index]) {
    seen_[index] = 1;
    bad_[index] = 0;
    std::fill_n(row, slot.num_blocks, 0.0);
    if (slot.absmax_cell >= 0) row_[slot.absmax_cell] = 0;
  }
  double absmax = 0;
  for (int64_t b = 0; b < slot.num_blocks; ++b) {
    row[b] += sums.bad[b] > 0 ? std::numeric_limits<double>::quiet_NaN() : sums.sumsq[b];
    bad_[index] += sums.bad[b];
    absmax = std::max(absmax, sums.absmax[b]);
  }
  if (slot.absmax_cell >= 0) row_[slot.absmax_cell] = std::max(row_[slot.absmax_cell], absmax);
}

void StepBuffer::Add(int64_t slot, const Matrix& x, int num_threads, double* row_sums) {
  CheckBlocks(At(slot), x);
  Sums& sums = LastAdded();
  Read(slots_[slot], x, num_threads, &sums, row_sums);
  const std::lock_guard<std::mutex> lock(mutex_);
  Merge(slot, sums);
}

void StepBuffer::Repeat(int64_t slot) {
  const Slot& wanted = At(slot);
  const std::lock_guard<std::mutex> lock(mutex_);
  const Sums& last = LastAdded();
  if (static_cast<int64_t>(last.sumsq.size()) != wanted.num_blocks)
    throw std::invalid_argument("the last input had another number of blocks than slot " + std::to_string(slot));
  Merge(slot, last);
}

void StepBuffer::Set(int64_t slot, const Matrix& x, int num_threads) {
  CheckBlocks(At(slot), x);
  Sums& sums = LastSet();
  Read(slots_[slot], x, num_threads, &sums, nullptr);
  const std::lock_guard<std::mutex> lock(mutex_);
  seen_[slot] = 0;
  Merge(slot, sums);
}

void StepBuffer::SetMany(const std::vector<Item>& items, int num_threads) {
  for (const Item& item : items) CheckBlocks(At(item.slot), item.x);
  struct Job {
    StepBuffer* buffer;
    const Item* items;
  } job{this, items.data()};
  const auto set = [](void* context, int64_t i) {
    const Job& job = *static_cast<Job*>(context);
    job.buffer->Set(job.items[i].slot, job.items[i].x, 1);
  };
  ThreadPool::Instance().Run(static_cast<int64_t>(items.size()), num_threads, set, &job);
}

void StepBuffer::AddRanges(int64_t first_slot, const Matrix& x, const int32_t* ends, int64_t num_ranges,
                           int num_threads) {
  At(first_slot);
  if (num_ranges > 0) At(first_slot + num_ranges - 1);
  Sums& sums = LastAdded();
  int64_t begin = 0;
  for (int64_t i = 0; i < num_ranges; ++i) {
    const int64_t end = ends[i];
    if (end < begin || end > x.rows)
      throw std::invalid_argument("row ranges must lie in the matrix and ascend, got " + std::to_string(end));
    if (end > begin) {
      Matrix range = x;
      range.data = static_cast<const char*>(x.data) + begin * x.row_stride * ElementBytes(x.dtype);
      range.rows = end - begin;
      CheckBlocks(slots_[first_slot + i], range);
      Read(slots_[first_slot + i], range, num_threads, &sums, nullptr);
      const std::lock_guard<std::mutex> lock(mutex_);
      Merge(first_slot + i, sums);
    }
    begin = end;
  }
}

void StepBuffer::Take(double grad_scale, double* row) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::fill(row, row + num_cells_, kAbsent);
  for (int64_t i = 0; i < num_slots(); ++i) {
    const Slot& slot = slots_[i];
    if (!seen_[i]) continue;
    const double scale = slot.is_gradient ? grad_scale : 1.0;
    for (int64_t c = slot.sumsq_cell; c < slot.sumsq_cell + slot.num_blocks; ++c) row[c] = row_[c] / (scale * scale);
    if (slot.absmax_cell >= 0) row[slot.absmax_cell] = row_[slot.absmax_cell] / scale;
    if (slot.bad_cell >= 0) row[slot.bad_cell] = bad_[i];
  }
  std::fill(seen_.begin(), seen_.end(), 0);
}

}  // namespace pyscan
