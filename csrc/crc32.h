// CRC-32 as zlib computes it (reflected polynomial 0xedb88320), so that Python's standard library can check a file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyscan {

// Checksum of `size` bytes. Pass the checksum of the bytes before them as `crc` to continue.
uint32_t Crc32(const void* data, size_t size, uint32_t crc = 0);

}  // namespace pyscan
