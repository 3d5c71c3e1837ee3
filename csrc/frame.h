// Frames as bytes: built around a payload, appended to a file, found again by walking the file. FrameFile is the one
// place that decides where a frame goes; writer.cpp decides when.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "format.h"
#include "sink.h"

namespace pyscan {

using RunId = std::array<uint8_t, kRunIdBytes>;

// A payload under construction with room for the frame header and the chunk table before it, so that a frame is
// written from one piece of memory. The memory is kept from frame to frame.
class FrameBuffer {
 public:
  // Makes room for a payload of zeros and returns its start.
  uint8_t* Start(uint64_t payload_bytes);
  uint8_t* payload() { return bytes_.data() + payload_offset_; }
  uint64_t payload_bytes() const { return payload_bytes_; }

  // Fills in the chunk table and the header. `header` brings kind, rows, flags, steps and numbers.
  void Seal(FrameHeader header, const RunId& run_id);
  const uint8_t* data() const { return bytes_.data(); }
  uint64_t size() const { return bytes_.size(); }

 private:
  std::vector<uint8_t> bytes_;
  uint64_t payload_offset_ = 0;
  uint64_t payload_bytes_ = 0;
};

struct FrameInfo {
  uint64_t offset;
  FrameHeader header;
};

// A file header followed by frames.
class FrameFile {
 public:
  // Opens the file. A new or torn one (shorter than a header) gets a header with run_id; of an existing one run_id()
  // becomes what the file says. Throws std::invalid_argument if the file is something else than version 2.
  // With `lock`, takes the lock before the first byte is read or written.
  void Open(const std::string& path, Sink::Mode mode, const RunId& run_id, bool lock);

  // Writes the frame after the last one. The header goes last: until it stands, a reader finds no frame there, and a
  // frame torn by a crash has no header that a longer file could make look whole.
  void Append(FrameBuffer& buffer, FrameHeader header);

  // Cuts the file back to its header.
  void Clear();

  // Reads the payload of a frame; false if a checksum does not fit.
  bool ReadPayload(const FrameInfo& frame, std::vector<uint8_t>* payload) const;

  Sink& sink() { return sink_; }
  const Sink& sink() const { return sink_; }
  const RunId& run_id() const { return run_id_; }
  uint64_t end() const { return end_; }  // where the next frame goes
  // All good frames, in the order of the file.
  const std::vector<FrameInfo>& frames() const { return frames_; }

 private:
  void ReadHeader(uint64_t size);
  void WriteHeader();
  void Walk(uint64_t size, bool writable);
  bool IsGood(const FrameHeader& header) const;

  Sink sink_;
  RunId run_id_{};
  std::vector<FrameInfo> frames_;
  uint64_t end_ = 0;  // where the next frame goes, a multiple of 64
};

}  // namespace pyscan
