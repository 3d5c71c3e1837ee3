#include "steps.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pyscan {
namespace {

// [row][cell] to [cell][row], in tiles that stay in the first-level cache: 64 rows by 32 cells are 2 x 4 KiB.
template <typename T>
void Transpose(const uint8_t* source, uint32_t rows, uint64_t cells, uint8_t* target) {
  constexpr uint64_t kTileCells = 32;
  const T* from = reinterpret_cast<const T*>(source);
  T* to = reinterpret_cast<T*>(target);
  for (uint64_t begin = 0; begin < cells; begin += kTileCells) {
    const uint64_t end = std::min(begin + kTileCells, cells);
    for (uint32_t row = 0; row < rows; ++row) {
      for (uint64_t cell = begin; cell < end; ++cell) to[cell * rows + row] = from[row * cells + cell];
    }
  }
}

uint64_t SectionBytes(const Channel& channel, uint32_t rows) {
  return Pad64(channel.num_cells * CodecBytes(channel.codec) * rows);
}

}  // namespace

uint64_t NumCells(const Layout& layout) {
  uint64_t cells = 0;
  for (const Channel& channel : layout) cells += channel.num_cells;
  return cells;
}

uint64_t StepsPayloadBytes(const Layout& layout, uint32_t rows) {
  uint64_t bytes = Pad64(sizeof(RowRecord) * rows);
  for (const Channel& channel : layout) bytes += SectionBytes(channel, rows);
  return bytes;
}

StepsBlock::StepsBlock(Layout layout) : layout_(std::move(layout)), isa_(ActiveIsa()), codes_(layout_.size()) {
  records_.reserve(kFrameRows);
  for (size_t channel = 0; channel < layout_.size(); ++channel) codes_[channel].resize(kFrameRows * RowBytes(channel));
}

void StepsBlock::Add(const RowRecord& record, const double* cells) {
  for (size_t i = 0; i < layout_.size(); ++i) {
    const Channel& channel = layout_[i];
    Pack(isa_, channel.codec, channel.transform, cells, channel.num_cells, RowOf(i, rows()));
    cells += channel.num_cells;
  }
  records_.push_back(record);
}

void StepsBlock::AddFromRowMajor(const uint8_t* payload, uint32_t rows, uint32_t row) {
  RowRecord record;
  std::memcpy(&record, payload + row * sizeof(record), sizeof(record));
  payload += Pad64(sizeof(RowRecord) * rows);
  for (size_t i = 0; i < layout_.size(); ++i) {
    std::copy_n(payload + row * RowBytes(i), RowBytes(i), RowOf(i, this->rows()));
    payload += SectionBytes(layout_[i], rows);
  }
  records_.push_back(record);
}

void StepsBlock::BuildRowMajor(uint32_t first_row, FrameBuffer* buffer) const {
  const uint32_t num_rows = rows() - first_row;
  uint8_t* out = buffer->Start(StepsPayloadBytes(layout_, num_rows));
  std::memcpy(out, records_.data() + first_row, sizeof(RowRecord) * num_rows);
  out += Pad64(sizeof(RowRecord) * num_rows);
  for (size_t i = 0; i < layout_.size(); ++i) {
    std::copy_n(RowOf(i, first_row), RowBytes(i) * num_rows, out);
    out += SectionBytes(layout_[i], num_rows);
  }
}

void StepsBlock::BuildColumnMajor(FrameBuffer* buffer) const {
  uint8_t* out = buffer->Start(StepsPayloadBytes(layout_, rows()));
  std::memcpy(out, records_.data(), sizeof(RowRecord) * rows());
  out += Pad64(sizeof(RowRecord) * rows());
  for (size_t i = 0; i < layout_.size(); ++i) {
    const auto transpose = layout_[i].codec == Codec::kF32 ? Transpose<uint32_t> : Transpose<uint16_t>;
    transpose(codes_[i].data(), rows(), layout_[i].num_cells, out);
    out += SectionBytes(layout_[i], rows());
  }
}

}  // namespace pyscan
