#include "frame.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "crc32.h"

namespace pyscan {
namespace {

uint64_t WallClockNs() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

// CRC-32 of each chunk of the payload into `table`, whose padding the caller has zeroed.
void FillTable(const uint8_t* payload, uint64_t payload_bytes, uint8_t* table) {
  for (uint64_t chunk = 0; chunk < NumChunks(payload_bytes); ++chunk) {
    const uint64_t begin = chunk * kChunkBytes;
    const uint32_t crc = Crc32(payload + begin, std::min(kChunkBytes, payload_bytes - begin));
    std::memcpy(table + 4 * chunk, &crc, sizeof(crc));
  }
}

}  // namespace

uint8_t* FrameBuffer::Start(uint64_t payload_bytes) {
  payload_bytes_ = payload_bytes;
  payload_offset_ = sizeof(FrameHeader) + TableBytes(payload_bytes);
  bytes_.assign(FrameBytes(payload_bytes), 0);
  return payload();
}

void FrameBuffer::Seal(FrameHeader header, const RunId& run_id) {
  uint8_t* table = bytes_.data() + sizeof(FrameHeader);
  FillTable(payload(), payload_bytes_, table);
  std::memcpy(header.magic, kFrameMagic, sizeof(header.magic));
  header.payload_bytes = payload_bytes_;
  std::memcpy(header.run_mark, run_id.data(), kRunMarkBytes);
  header.table_crc = Crc32(table, TableBytes(payload_bytes_));
  header.crc = Crc32(&header, offsetof(FrameHeader, crc));
  std::memcpy(bytes_.data(), &header, sizeof(header));
}

void FrameFile::Open(const std::string& path, Sink::Mode mode, const RunId& run_id, bool lock) {
  run_id_ = run_id;
  frames_.clear();
  sink_.Open(path, mode);
  if (lock) sink_.Lock();
  const uint64_t size = sink_.Size();
  ReadHeader(size);
  if (size < sizeof(FileHeader)) {
    if (mode != Sink::Mode::kRead) WriteHeader();
    end_ = sizeof(FileHeader);
  } else {
    Walk(size, mode != Sink::Mode::kRead);
  }
}

void FrameFile::ReadHeader(uint64_t size) {
  FileHeader header{};
  sink_.ReadAt(0, &header, sizeof(header));
  const size_t num_magic = std::min<uint64_t>(size, sizeof(header.magic));
  if (std::memcmp(header.magic, kFileMagic, num_magic) != 0) {
    throw std::invalid_argument(sink_.path() + " is not an .mscan file; choose another path");
  }
  if (size < sizeof(header)) return;
  if (header.version != kVersion) {
    throw std::invalid_argument(sink_.path() + " has version " + std::to_string(header.version) +
                                ", this writer continues version 2; choose another path");
  }
  if (header.crc != Crc32(&header, offsetof(FileHeader, crc))) {
    throw std::invalid_argument("the header of " + sink_.path() + " is damaged; choose another path");
  }
  std::memcpy(run_id_.data(), header.run_id, kRunIdBytes);
}

void FrameFile::WriteHeader() {
  FileHeader header{};
  std::memcpy(header.magic, kFileMagic, sizeof(header.magic));
  header.version = kVersion;
  header.header_bytes = sizeof(header);
  std::memcpy(header.run_id, run_id_.data(), kRunIdBytes);
  header.created_ns = WallClockNs();
  header.crc = Crc32(&header, offsetof(FileHeader, crc));
  sink_.WriteAt(0, &header, sizeof(header));
}

void FrameFile::Append(FrameBuffer& buffer, FrameHeader header) {
  buffer.Seal(header, run_id_);
  sink_.WriteAt(end_ + sizeof(FrameHeader), buffer.data() + sizeof(FrameHeader), buffer.size() - sizeof(FrameHeader));
  sink_.WriteAt(end_, buffer.data(), sizeof(FrameHeader));
  std::memcpy(&header, buffer.data(), sizeof(header));
  frames_.push_back({end_, header});
  end_ += buffer.size();
}

void FrameFile::Clear() {
  sink_.Truncate(sizeof(FileHeader));
  frames_.clear();
  end_ = sizeof(FileHeader);
}

// Whether the header is one of this file, wherever its frame may end.
bool FrameFile::IsGood(const FrameHeader& header) const {
  return std::memcmp(header.magic, kFrameMagic, sizeof(header.magic)) == 0 &&
         header.crc == Crc32(&header, offsetof(FrameHeader, crc)) &&
         std::memcmp(header.run_mark, run_id_.data(), kRunMarkBytes) == 0;
}

void FrameFile::Walk(uint64_t size, bool writable) {
  // Of good frames only the headers are read. Damage is stepped over 64 bytes at a time, but read in larger pieces.
  std::vector<uint8_t> window(1 << 16);
  uint64_t window_offset = 0;
  uint64_t window_bytes = 0;
  bool damaged = false;
  uint64_t offset = sizeof(FileHeader);
  while (offset + sizeof(FrameHeader) <= size) {
    if (offset < window_offset || offset + sizeof(FrameHeader) > window_offset + window_bytes) {
      window_offset = offset;
      window_bytes = sink_.ReadAt(offset, window.data(), damaged ? window.size() : sizeof(FrameHeader));
      if (window_bytes < sizeof(FrameHeader)) break;
    }
    FrameHeader header;
    std::memcpy(&header, window.data() + (offset - window_offset), sizeof(header));
    const bool good = IsGood(header);
    damaged = !good;
    if (!good) {
      offset += kAlign;
    } else if (header.payload_bytes <= size && FrameBytes(header.payload_bytes) <= size - offset) {
      frames_.push_back({offset, header});
      offset += FrameBytes(header.payload_bytes);
    } else {
      // The file was cut inside this frame. Bytes appended now would make its header look like that of a whole frame
      // which contains them; so the header is wiped. No reader has ever believed it.
      const FrameHeader zeros{};
      if (writable) sink_.WriteAt(offset, &zeros, sizeof(zeros));
      offset += kAlign;
    }
  }
  end_ = Pad64(size);
}

bool FrameFile::ReadPayload(const FrameInfo& frame, std::vector<uint8_t>* payload) const {
  const uint64_t payload_bytes = frame.header.payload_bytes;
  const uint64_t table_bytes = TableBytes(payload_bytes);
  std::vector<uint8_t> stored(table_bytes);
  std::vector<uint8_t> computed(table_bytes, 0);
  payload->resize(payload_bytes);
  const uint64_t table_offset = frame.offset + sizeof(FrameHeader);
  if (sink_.ReadAt(table_offset, stored.data(), table_bytes) != table_bytes) return false;
  if (sink_.ReadAt(table_offset + table_bytes, payload->data(), payload_bytes) != payload_bytes) return false;
  FillTable(payload->data(), payload_bytes, computed.data());
  return frame.header.table_crc == Crc32(stored.data(), table_bytes) && stored == computed;
}

}  // namespace pyscan
