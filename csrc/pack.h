// Float64 cells of a row to the codes of the file, and back. The writer calls Pack for each channel of a row; Unpack
// is the definition the tests hold it to.
//
// Input: a value below zero means "absent" (not observed); NaN, +infinity and 0 keep their meaning.
//
// log2q8 is exact: an octave has 256 codes (128 for a sum of squares), parted by thresholds 2^((k + 1/2) / 256). The
// code of a value is the number of thresholds below it. A table indexed by the top 9 bits of the mantissa holds, for
// each of 512 intervals of an octave, the thresholds below the interval and the one threshold it may contain (they
// are at least 0.0027 apart, an interval is 0.00195 wide). So for every double, not only for those tested:
//   - the code is monotone in the value, since counting thresholds is;
//   - the relative error is at most 2^(1/512) - 1 = 0.13547 %, plus 2e-15 for the rounding of a threshold, while the
//     code is not clamped (values from 2^-127.98 to 2^127.98, sums of squares from 2^-255.97 to 2^255.97);
//   - every machine writes the same code: the thresholds come of multiplications and square roots, which IEEE 754
//     rounds alike everywhere.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace pyscan {

enum class Codec : uint8_t { kLog2q8, kU16, kF32 };
enum class Transform : uint8_t { kPlain, kRoot };

// Bytes of one cell.
constexpr size_t CodecBytes(Codec codec) { return codec == Codec::kF32 ? 4 : 2; }

// Throw std::invalid_argument for a name that FORMAT.md does not have.
Codec ParseCodec(const char* name);
Transform ParseTransform(const char* name);

// Packs `count` cells into `out`, which holds count * CodecBytes(codec) bytes. u16 rounds to nearest and clamps to
// [0, 65535]; it has no code for absent, NaN counts as 0.
void Pack(Isa isa, Codec codec, Transform transform, const double* cells, size_t count, void* out);

// The values that codes stand for, after the transform; absent is -1.
void Unpack(Codec codec, const void* codes, size_t count, double* cells);

}  // namespace pyscan
