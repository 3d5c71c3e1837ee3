// The rows of the steps frame that is being filled: packed as they come, kept row-major, laid out as a payload when a
// frame is due. Receives float64 rows, hands payloads to frame.h.
#pragma once

#include <cstdint>
#include <vector>

#include "format.h"
#include "frame.h"
#include "isa.h"
#include "pack.h"

namespace pyscan {

struct Channel {
  Codec codec;
  Transform transform;
  uint64_t num_cells;
};

using Layout = std::vector<Channel>;

uint64_t NumCells(const Layout& layout);

// Bytes of the payload of a steps frame.
uint64_t StepsPayloadBytes(const Layout& layout, uint32_t rows);

class StepsBlock {
 public:
  explicit StepsBlock(Layout layout);

  uint32_t rows() const { return static_cast<uint32_t>(records_.size()); }
  bool full() const { return rows() == kFrameRows; }
  const RowRecord& record(uint32_t row) const { return records_[row]; }
  const Layout& layout() const { return layout_; }

  // Both need a block that is not full. The second takes row `row` of a row-major payload of `rows` rows.
  void Add(const RowRecord& record, const double* cells);
  void AddFromRowMajor(const uint8_t* payload, uint32_t rows, uint32_t row);
  void Clear() { records_.clear(); }

  // Rows from `first_row` on, row-major; and all rows, column-major.
  void BuildRowMajor(uint32_t first_row, FrameBuffer* buffer) const;
  void BuildColumnMajor(FrameBuffer* buffer) const;

 private:
  uint8_t* RowOf(size_t channel, uint32_t row) { return codes_[channel].data() + row * RowBytes(channel); }
  const uint8_t* RowOf(size_t channel, uint32_t row) const { return codes_[channel].data() + row * RowBytes(channel); }
  uint64_t RowBytes(size_t channel) const { return layout_[channel].num_cells * CodecBytes(layout_[channel].codec); }

  const Layout layout_;
  const Isa isa_;
  std::vector<RowRecord> records_;
  std::vector<std::vector<uint8_t>> codes_;  // per channel: [row][cell], room for kFrameRows rows
};

}  // namespace pyscan
