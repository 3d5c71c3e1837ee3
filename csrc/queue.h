// The rows on their way from the training thread to the writer thread: a ring of preallocated slots. Handing over a
// row is one copy into a slot; nothing is allocated and nothing waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "format.h"

namespace pyscan {

// One thread at a time may push, and one may take. A slot belongs to the pusher until num_pushed_ counts it, and to
// the taker until num_taken_ does.
class RowQueue {
 public:
  struct Slot {
    RowRecord record;
    std::vector<double> cells;
  };

  RowQueue(size_t num_slots, size_t num_cells) : slots_(num_slots), num_cells_(num_cells) {
    for (Slot& slot : slots_) slot.cells.resize(num_cells);
  }

  size_t num_cells() const { return num_cells_; }
  size_t size() const {
    return num_pushed_.load(std::memory_order_acquire) - num_taken_.load(std::memory_order_acquire);
  }
  // Half of the slots: reason enough to wake the taker.
  size_t wake_size() const { return (slots_.size() + 1) / 2; }
  bool full() const { return size() == slots_.size(); }

  // Pusher. Copies num_cells() cells; false if every slot is taken.
  bool Push(const RowRecord& record, const double* cells) {
    if (full()) return false;
    const uint64_t number = num_pushed_.load(std::memory_order_relaxed);
    Slot& slot = slots_[number % slots_.size()];
    slot.record = record;
    if (num_cells_ > 0) std::memcpy(slot.cells.data(), cells, num_cells_ * sizeof(double));
    num_pushed_.store(number + 1, std::memory_order_release);
    return true;
  }

  // Taker. The oldest slot, to be read until Pop gives it back; size() must not be 0.
  const Slot& Front() const { return slots_[num_taken_.load(std::memory_order_relaxed) % slots_.size()]; }
  void Pop() { num_taken_.fetch_add(1, std::memory_order_release); }

 private:
  std::vector<Slot> slots_;
  const size_t num_cells_;
  std::atomic<uint64_t> num_pushed_{0};
  std::atomic<uint64_t> num_taken_{0};
};

}  // namespace pyscan
