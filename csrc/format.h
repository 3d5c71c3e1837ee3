// The numbers of FORMAT.md: the structures of an .mscan file as they lie on disk, and the sizes that follow from them.
// Nothing here reads or writes; frame.h builds frames of these pieces and sink.h puts them into files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyscan {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "structures are written as they lie in memory");

inline constexpr char kFileMagic[5] = {'M', 'S', 'C', 'A', 'N'};
inline constexpr uint16_t kVersion = 2;
inline constexpr char kFrameMagic[4] = {'F', 'R', 'A', 'M'};
inline constexpr char kIndexMagic[8] = {'M', 'S', 'C', 'A', 'N', 'I', 'D', 'X'};

inline constexpr uint64_t kAlign = 64;
inline constexpr uint64_t kChunkBytes = 4096;  // payload bytes under one checksum
inline constexpr uint32_t kFrameRows = 64;     // rows of a full steps frame
inline constexpr size_t kRunIdBytes = 16;
inline constexpr size_t kRunMarkBytes = 8;  // the part of the run id that every frame header repeats

enum class FrameKind : uint32_t { kSchema = 1, kSteps = 2, kEvents = 3, kTokens = 4, kIndex = 5 };

inline constexpr uint32_t kFrameRowMajor = 1;  // frame flag; tail file only

inline constexpr uint32_t kRowSkipped = 1;
inline constexpr uint32_t kRowAfterClip = 2;
inline constexpr uint32_t kRowResumed = 4;
inline constexpr uint32_t kRowHasTokens = 8;
inline constexpr uint32_t kRowHasLoss = 16;
inline constexpr uint32_t kRowHasLr = 32;
inline constexpr uint32_t kRowHasGradScale = 64;
inline constexpr uint32_t kRowHasTotalNorm = 128;

// Codes of log2q8. Finite values take [-kMaxCode, kMaxCode].
inline constexpr int16_t kZeroCode = -32768;
inline constexpr int16_t kAbsentCode = -32767;
inline constexpr int16_t kMaxCode = 32765;
inline constexpr int16_t kNanCode = 32766;
inline constexpr int16_t kInfCode = 32767;
inline constexpr uint32_t kAbsentFloatBits = 0x7fc0ab5e;  // codec f32

#pragma pack(push, 1)

struct FileHeader {
  char magic[5];
  uint16_t version;
  uint8_t zero;
  uint32_t header_bytes;
  uint32_t flags;
  uint8_t run_id[kRunIdBytes];
  uint64_t created_ns;
  uint8_t zeros[20];
  uint32_t crc;  // of the bytes before it
};

struct FrameHeader {
  char magic[4];
  uint32_t kind;
  uint64_t payload_bytes;
  uint64_t first_step;
  uint64_t first_row;
  uint32_t rows;
  uint32_t flags;
  uint64_t frame_number;
  uint8_t run_mark[kRunMarkBytes];
  uint32_t table_crc;  // of the chunk table with its padding
  uint32_t crc;        // of the bytes before it
};

struct RowRecord {
  uint64_t step;
  uint64_t time_ns;
  uint64_t tokens;
  float loss;
  float lr;
  float grad_scale;
  float total_norm;
  uint32_t flags;
  uint32_t zero;
};

struct IndexEntry {
  uint64_t offset;
  uint32_t kind;
  uint32_t rows;
  uint64_t first_step;
  uint64_t first_row;
  uint64_t payload_bytes;
  uint64_t frame_number;
};

struct IndexEnd {
  uint64_t index_offset;
  char magic[8];
};

#pragma pack(pop)

static_assert(sizeof(FileHeader) == 64 && offsetof(FileHeader, crc) == 60);
static_assert(sizeof(FrameHeader) == 64 && offsetof(FrameHeader, crc) == 60);
static_assert(sizeof(RowRecord) == 48 && sizeof(IndexEntry) == 48 && sizeof(IndexEnd) == 16);

constexpr uint64_t Pad64(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

constexpr uint64_t NumChunks(uint64_t payload_bytes) {
  return payload_bytes / kChunkBytes + (payload_bytes % kChunkBytes != 0);
}

constexpr uint64_t TableBytes(uint64_t payload_bytes) { return Pad64(4 * NumChunks(payload_bytes)); }

// What a frame takes in the file: header, chunk table, payload and padding. payload_bytes must be below 2^62.
constexpr uint64_t FrameBytes(uint64_t payload_bytes) {
  return sizeof(FrameHeader) + TableBytes(payload_bytes) + Pad64(payload_bytes);
}

}  // namespace pyscan
