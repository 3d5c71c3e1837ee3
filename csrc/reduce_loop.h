// The loops of the reduction, written once over GCC's vector types and compiled per instruction set. Each including
// file sits in an anonymous namespace of its own: a function compiled with AVX flags must never be the copy that the
// linker keeps for everyone.
//
// A tile of at most 8 rows x 64 columns is the unit. Its squares are summed in float32, its magnitudes compared as
// integers: the bits of a float without its sign sort like its value, infinities and NaN above all finite ones, so one
// maximum tells at once the largest magnitude, whether anything is not finite and whether float32 could hold the
// squares. A tile that float32 cannot hold, or that has non-finite values, is read again in float64 (CarefulTile).

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "reduce_chunk.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pyscan {
namespace {

// A vector of the widest registers there are: `kLanes` floats, or as many bytes of anything else.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#else
constexpr int kVectorBytes = 32;
#endif
constexpr int kLanes = kVectorBytes / 4;
constexpr int kDoubleLanes = kVectorBytes / 8;
using Floats = float __attribute__((vector_size(kVectorBytes)));
using Doubles = double __attribute__((vector_size(kVectorBytes)));
using Longs = int64_t __attribute__((vector_size(kVectorBytes)));
using Ints = int32_t __attribute__((vector_size(kVectorBytes)));
using Shorts = int16_t __attribute__((vector_size(kVectorBytes)));
using HalfFloats = float __attribute__((vector_size(kVectorBytes / 2)));
using Floats8 = float __attribute__((vector_size(32)));

// Elements that are read together, and how many times that is a tile's width.
constexpr int64_t kUnitCols = 2 * kLanes;
constexpr int64_t kTileUnits = kTileCols / kUnitCols;

template <class V>
inline V Load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <class V>
inline V Max(V a, V b) {
  return a > b ? a : b;
}

#if defined(__AVX512F__)
inline HalfFloats LowHalf(Floats v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
inline HalfFloats HighHalf(Floats v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
#endif

inline Doubles Widen(Floats v) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)LowHalf(v)) +
         (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)HighHalf(v));
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)) +
         (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#else
  HalfFloats low, high;
  std::memcpy(&low, &v, sizeof(low));
  std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
  return __builtin_convertvector(low, Doubles) + __builtin_convertvector(high, Doubles);
#endif
}

// As doubles, whatever the width of other vectors.
inline Doubles WidenRows(Floats8 v) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)v);
#else
  return Widen(v);
#endif
}

inline double Sum(Doubles v) {
  double sum[kDoubleLanes];
  std::memcpy(sum, &v, sizeof(v));
  for (int count = kDoubleLanes / 2; count > 0; count /= 2)
    for (int i = 0; i < count; ++i) sum[i] = sum[2 * i] + sum[2 * i + 1];
  return sum[0];
}

// True if any lane is set in a mask of a vector's size.
template <class Mask>
inline bool Any(Mask mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  const Longs m = (Longs)mask;
  return ((m[0] | m[1]) | (m[2] | m[3])) != 0;
#endif
}

// Storage formats. Unit is what 2 * kLanes neighbouring elements become: two vectors of floats, and their magnitudes as
// integers. Tiles whose maximum is at or above kTooLarge or below kTooSmall (as bits) are read again in float64. With
// gradual underflow the 512 squares of a tile together are off by less than 512 * 2^-150, which against a maximum of
// 2^-58 is 2^-25; 512 squares of 2^59 stay below 2^128.
struct Float32 {
  using Bits = Ints;
  static constexpr int64_t kBytes = 4;
  static constexpr int32_t kTooLarge = (127 + 59) << 23;
  static constexpr int32_t kTooSmall = (127 - 58) << 23;
  static void Unit(const char* p, Floats& a, Floats& b, Bits& magnitude) {
    a = Load<Floats>(p);
    b = Load<Floats>(p + kVectorBytes);
    const Ints mask = Ints{} + 0x7fffffff;
    magnitude = Max(magnitude, Max((Ints)a & mask, (Ints)b & mask));
  }
  static double Value(const char* p) { return Load<float>(p); }
  static double FromBits(int32_t bits) {
    float v;
    std::memcpy(&v, &bits, sizeof(v));
    return v;
  }
};

struct Bfloat16 {
  using Bits = Shorts;
  static constexpr int64_t kBytes = 2;
  static constexpr int16_t kTooLarge = (127 + 59) << 7;
  static constexpr int16_t kTooSmall = (127 - 58) << 7;
  // Even elements go to a, odd ones to b: the two halves of each 32-bit word are already where a float32 has its upper
  // half.
  static void Unit(const char* p, Floats& a, Floats& b, Bits& magnitude) {
    const Ints word = Load<Ints>(p);
    a = (Floats)(word << 16);
    b = (Floats)(word & (Ints{} + int32_t(0xffff0000)));
    magnitude = Max(magnitude, (Shorts)word & (Shorts{} + int16_t(0x7fff)));
  }
  static double Value(const char* p) { return FromBits(Load<uint16_t>(p)); }
  static double FromBits(uint32_t bits) { return Float32::FromBits(int32_t(bits << 16)); }
};

struct Float16 {
  using Bits = Shorts;
  static constexpr int64_t kBytes = 2;
  static constexpr int16_t kTooLarge = 0x7c00;  // infinity: the square of 65504 is far inside float32
  static constexpr int16_t kTooSmall = 0;       // and so is that of 2^-24
  static void Unit(const char* p, Floats& a, Floats& b, Bits& magnitude) {
    const Shorts half = Load<Shorts>(p);
    magnitude = Max(magnitude, half & (Shorts{} + int16_t(0x7fff)));
#if defined(__AVX512F__)
    a = (Floats)_mm512_maskz_cvtph_ps(0xffff, Load<__m256i>(p));
    b = (Floats)_mm512_maskz_cvtph_ps(0xffff, Load<__m256i>(p + 32));
#elif defined(__F16C__)
    a = (Floats)_mm256_cvtph_ps(Load<__m128i>(p));
    b = (Floats)_mm256_cvtph_ps(Load<__m128i>(p + 16));
#else
    // Magnitudes are enough: the exponent of a half, shifted into a float's place, is too small by 112.
    const Ints word = (Ints)half;
    const Floats rebias = Floats{} + 0x1p112f;
    a = (Floats)((word & (Ints{} + 0x7fff)) << 13) * rebias;
    b = (Floats)(((word >> 16) & (Ints{} + 0x7fff)) << 13) * rebias;
#endif
  }
  static double Value(const char* p) { return FromBits(Load<uint16_t>(p)); }
  static double FromBits(uint32_t bits) {
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    const int exponent = bits >> 10 & 31;
    const int fraction = bits & 1023;
    if (exponent == 31)
      return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    if (exponent == 0) return sign * fraction * 0x1p-24;
    return Float32::FromBits(int32_t((bits & 0x8000) << 16 | (exponent + 112) << 23 | fraction << 13));
  }
};

struct Float64 {
  static constexpr int64_t kBytes = 8;
  static double Value(const char* p) { return Load<double>(p); }
};

// What one block has gathered inside a chunk. `careful_max` and `bad` come from tiles that were read again.
template <class Bits>
struct BlockSums {
  Doubles sumsq;
  Bits magnitude;
  double careful_max;
  double bad;
};

struct Strides {
  int64_t row, col;  // bytes
};

// Reads a tile value by value in float64: any format, any stride, any value. Adds to sums and, if `row_sumsq` is not
// null, to row_sumsq[r * row_step].
template <class Format, class Bits>
__attribute__((noinline)) void CarefulTile(const char* tile, Strides strides, int64_t rows, int64_t cols,
                                           BlockSums<Bits>& sums, double* row_sumsq, int64_t row_step) {
  const int64_t padded = (cols + kDoubleLanes - 1) / kDoubleLanes * kDoubleLanes;
  double values[kTileCols] = {};
  Doubles max = {};
  Longs bad = {};
  for (int64_t r = 0; r < rows; ++r) {
    const char* p = tile + r * strides.row;
    for (int64_t c = 0; c < cols; ++c) values[c] = Format::Value(p + c * strides.col);
    Doubles sum = {};
    for (int64_t c = 0; c < padded; c += kDoubleLanes) {
      const Doubles v = (Doubles)(Load<Longs>(values + c) & (Longs{} + std::numeric_limits<int64_t>::max()));
      const Longs finite = v <= Doubles{} + std::numeric_limits<double>::max();
      const Doubles kept = (Doubles)((Longs)v & finite);
      sum += kept * kept;
      max = Max(max, kept);
      bad += finite + 1;  // a true lane is -1
    }
    sums.sumsq += sum;
    if (row_sumsq != nullptr) row_sumsq[r * row_step] += Sum(sum);
  }
  for (int lane = 0; lane < kDoubleLanes; ++lane) {
    sums.careful_max = std::max(sums.careful_max, max[lane]);
    sums.bad += double(bad[lane]);
  }
}

// The sum of `kCount` vectors as a tree. A template and not a loop: the vectors must stay in registers.
template <int kCount>
inline Floats Tree(const Floats* v) {
  if constexpr (kCount == 1) {
    return v[0];
  } else {
    return Tree<kCount / 2>(v) + Tree<kCount - kCount / 2>(v + kCount / 2);
  }
}

// How far ahead of a row's tile to ask for memory: the hardware prefetcher loses a stream where it crosses a page.
// Asking cuts the time of a tensor that is not in the cache by an eighth, and costs one that is a few percent.
constexpr int64_t kAheadBytes = 1024;

template <class Format, int kUnits>
inline void Prefetch(const char* p) {
#pragma GCC unroll 4
  for (int64_t at = 0; at < kUnits * kUnitCols * Format::kBytes; at += 64) __builtin_prefetch(p + kAheadBytes + at);
}

// Sums down the rows of `kUnits` * kUnitCols contiguous columns.
template <class Format, int kUnits>
inline Doubles SumColumns(const char* p, int64_t row_bytes, int64_t rows, typename Format::Bits& magnitude) {
  Floats acc[2 * kUnits];
#pragma GCC unroll 8
  for (int i = 0; i < 2 * kUnits; ++i) acc[i] = Floats{};
  for (int64_t r = 0; r < rows; ++r, p += row_bytes) {
    Prefetch<Format, kUnits>(p);
#pragma GCC unroll 4
    for (int u = 0; u < kUnits; ++u) {
      Floats a, b;
      Format::Unit(p + u * kUnitCols * Format::kBytes, a, b, magnitude);
      acc[2 * u] += a * a;
      acc[2 * u + 1] += b * b;
    }
  }
  return Widen(Tree<2 * kUnits>(acc));
}

// Neighbours added: [a0+a1, a2+a3, ..., b0+b1, ...]. Three rounds of it turn 8 vectors into the vector of their sums.
inline Floats8 PairSums(Floats8 a, Floats8 b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}

// A vector whose sum is that of `v`.
inline Floats8 Fold(Floats v) {
#if defined(__AVX512F__)
  return LowHalf(v) + HighHalf(v);
#else
  return v;
#endif
}

// The same, adding the sum of every row to row_sumsq[r], which has 8 roundings at most.
template <class Format, int kUnits>
inline Doubles SumRows(const char* p, int64_t row_bytes, int64_t rows, typename Format::Bits& magnitude,
                       double* row_sumsq) {
  Floats8 row[kTileRows];
  for (int64_t r = rows; r < kTileRows; ++r) row[r] = Floats8{};
  for (int64_t r = 0; r < rows; ++r, p += row_bytes) {
    Prefetch<Format, kUnits>(p);
    Floats even = {};
    Floats odd = {};
#pragma GCC unroll 4
    for (int u = 0; u < kUnits; ++u) {
      Floats a, b;
      Format::Unit(p + u * kUnitCols * Format::kBytes, a, b, magnitude);
      even += a * a;
      odd += b * b;
    }
    row[r] = Fold(even + odd);
  }
  const Floats8 sums = PairSums(PairSums(PairSums(row[0], row[1]), PairSums(row[2], row[3])),
                                PairSums(PairSums(row[4], row[5]), PairSums(row[6], row[7])));
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) row_sumsq[r] += sums[r];
  return WidenRows(sums);
}

template <class Format, bool kPerRow, int kUnits>
inline Doubles SumUnits(const char* p, int64_t row_bytes, int64_t rows, typename Format::Bits& magnitude,
                        double* row_sumsq) {
  if constexpr (kPerRow) return SumRows<Format, kUnits>(p, row_bytes, rows, magnitude, row_sumsq);
  return SumColumns<Format, kUnits>(p, row_bytes, rows, magnitude);
}

template <class Format, bool kPerRow>
inline Doubles SumTile(const char* p, int64_t row_bytes, int64_t rows, int64_t units, typename Format::Bits& magnitude,
                       double* row_sumsq) {
  if constexpr (kTileUnits == 4) {
    if (units == 4) return SumUnits<Format, kPerRow, 4>(p, row_bytes, rows, magnitude, row_sumsq);
    if (units == 3) return SumUnits<Format, kPerRow, 3>(p, row_bytes, rows, magnitude, row_sumsq);
  }
  if (units == 2) return SumUnits<Format, kPerRow, 2>(p, row_bytes, rows, magnitude, row_sumsq);
  return SumUnits<Format, kPerRow, 1>(p, row_bytes, rows, magnitude, row_sumsq);
}

// Sums a tile whose columns do not fill units, or are not neighbours in memory: they are first copied next to each
// other, padded with zeros, which change none of the three results.
template <class Format, bool kPerRow>
__attribute__((noinline)) Doubles SumOddTile(const char* tile, Strides strides, int64_t rows, int64_t cols,
                                             typename Format::Bits& magnitude, double* row_sumsq) {
  const bool contiguous = strides.col == Format::kBytes;
  const int64_t direct = contiguous ? cols / kUnitCols : 0;
  Doubles sumsq = {};
  if (direct > 0) sumsq = SumTile<Format, kPerRow>(tile, strides.row, rows, direct, magnitude, row_sumsq);
  const int64_t rest = cols - kUnitCols * direct;
  if (rest == 0) return sumsq;
  alignas(kVectorBytes) char copy[kTileRows * kTileCols * Format::kBytes];
  const int64_t units = (rest + kUnitCols - 1) / kUnitCols;
  const int64_t copy_bytes = units * kUnitCols * Format::kBytes;
  const char* source = tile + kUnitCols * direct * strides.col;
  for (int64_t r = 0; r < rows; ++r, source += strides.row) {
    char* to = copy + r * copy_bytes;
    std::memset(to, 0, copy_bytes);
    if (contiguous) {
      std::memcpy(to, source, rest * Format::kBytes);
    } else {
      for (int64_t c = 0; c < rest; ++c) std::memcpy(to + c * Format::kBytes, source + c * strides.col, Format::kBytes);
    }
  }
  return sumsq + SumTile<Format, kPerRow>(copy, copy_bytes, rows, units, magnitude, row_sumsq);
}

// What a chunk does with a tile, by format.
template <class Format, bool kPerRow>
struct Tile {
  using Bits = typename Format::Bits;
  using Element = std::remove_const_t<decltype(Format::kTooLarge)>;

  static void Add(const char* tile, Strides strides, int64_t rows, int64_t cols, BlockSums<Bits>& sums,
                  double* row_sumsq, int64_t row_step) {
    double tile_rows[kTileRows];
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) tile_rows[r] = 0;
    Bits magnitude = {};
    Doubles sumsq;
    if (cols == kTileCols && strides.col == Format::kBytes) {
      sumsq = SumUnits<Format, kPerRow, kTileUnits>(tile, strides.row, rows, magnitude, tile_rows);
    } else {
      sumsq = SumOddTile<Format, kPerRow>(tile, strides, rows, cols, magnitude, tile_rows);
    }
    if (__builtin_expect(NeedsCare(magnitude), 0)) {
      CarefulTile<Format>(tile, strides, rows, cols, sums, kPerRow ? row_sumsq : nullptr, row_step);
      return;
    }
    sums.sumsq += sumsq;
    sums.magnitude = Max(sums.magnitude, magnitude);
    if constexpr (kPerRow) {
      for (int64_t r = 0; r < rows; ++r) row_sumsq[r * row_step] += tile_rows[r];
    }
  }

  static double Absmax(const BlockSums<Bits>& sums) {
    uint32_t bits = 0;
    for (size_t lane = 0; lane < sizeof(Bits) / sizeof(Element); ++lane)
      bits = std::max(bits, uint32_t(sums.magnitude[lane]));
    return std::max(Format::FromBits(bits), sums.careful_max);
  }

 private:
  static bool NeedsCare(Bits magnitude) {
    if (Any(magnitude >= Bits{} + Element(Format::kTooLarge))) return true;
    return !Any(magnitude >= Bits{} + Element(Format::kTooSmall)) && Any(magnitude);
  }
};

template <bool kPerRow>
struct Tile<Float64, kPerRow> {
  struct Bits {};

  static void Add(const char* tile, Strides strides, int64_t rows, int64_t cols, BlockSums<Bits>& sums,
                  double* row_sumsq, int64_t row_step) {
    CarefulTile<Float64>(tile, strides, rows, cols, sums, kPerRow ? row_sumsq : nullptr, row_step);
  }

  static double Absmax(const BlockSums<Bits>& sums) { return sums.careful_max; }
};

// Where position `i` of the blocked axis lies: in which block, and where that block ends.
inline int64_t BlockOf(const Blocks& blocks, int64_t i) { return (i + blocks.first) / blocks.size; }
inline int64_t BlockEnd(const Blocks& blocks, int64_t i) {
  return (BlockOf(blocks, i) + 1) * blocks.size - blocks.first;
}

// The columns of one tile; the same for every band of a chunk.
struct Segment {
  int64_t col, cols;
  int64_t block;  // counted from the first of the chunk; 0 with row blocks
};

inline int CutColumns(const Blocks& blocks, const Chunk& chunk, Segment* segments) {
  const bool by_columns = blocks.axis == Blocks::Axis::kColumns;
  int count = 0;
  for (int64_t c = chunk.col_begin; c < chunk.col_end;) {
    int64_t end = std::min(c + kTileCols, chunk.col_end);
    if (by_columns) end = std::min(end, BlockEnd(blocks, c));
    segments[count++] = {c, end - c, by_columns ? BlockOf(blocks, c) - chunk.first_block : 0};
    c = end;
  }
  return count;
}

// Rows that are read together, from left to right: `count` of them, each `apart` rows after the one before.
struct Band {
  int64_t row, count, apart;
};

// Cuts the rows of a chunk into bands. With column blocks the rows of a band are spread over the chunk, and the next
// band is the rows right after them: kTileRows long streams, each in pages of its own, which the hardware prefetcher
// follows better than several in one page. What fills no band are neighbours.
template <class AddBand>
inline void CutRows(const Blocks& blocks, const Chunk& chunk, const AddBand& add_band) {
  const bool by_rows = blocks.axis == Blocks::Axis::kRows;
  const int64_t apart = by_rows ? 0 : (chunk.row_end - chunk.row_begin) / kTileRows;
  for (int64_t i = 0; i < apart; ++i) add_band(Band{chunk.row_begin + i, kTileRows, apart});
  for (int64_t row = chunk.row_begin + apart * kTileRows; row < chunk.row_end;) {
    int64_t end = std::min(row + kTileRows, chunk.row_end);
    if (by_rows) end = std::min(end, BlockEnd(blocks, row));
    add_band(Band{row, end - row, 1});
    row = end;
  }
}

// Walks a chunk band by band; the sums of a block wait in the first-level cache for the next band.
template <class Format, bool kPerRow>
void WalkChunk(const Matrix& x, const Blocks& blocks, const Chunk& chunk, const ReduceOutput& out) {
  using T = Tile<Format, kPerRow>;
  using Sums = BlockSums<typename T::Bits>;
  const int64_t row_bytes = x.row_stride * Format::kBytes, col_bytes = x.col_stride * Format::kBytes;
  const char* base = static_cast<const char*>(x.data);
  const bool by_rows = blocks.axis == Blocks::Axis::kRows;
  const int64_t row_step = out.row_blocks ? NumBlocks(x, blocks) : 1;
  Segment segments[kChunkCols / kTileCols + kMaxChunkBlocks + 1];
  const int num_segments = CutColumns(blocks, chunk, segments);
  Sums local[kMaxChunkBlocks];
  for (int64_t b = 0; b < chunk.num_blocks; ++b) local[b] = Sums{};
  CutRows(blocks, chunk, [&](const Band& band) {
    Sums* const sums = by_rows ? local + (BlockOf(blocks, band.row) - chunk.first_block) : local;
    const Strides strides = {band.apart * row_bytes, col_bytes};
    const char* const left = base + band.row * row_bytes;
    double* const row_sumsq = kPerRow ? out.row_sumsq + band.row * row_step : nullptr;
    for (int i = 0; i < num_segments; ++i) {
      const Segment& s = segments[i];
      double* const row_out = kPerRow && out.row_blocks ? row_sumsq + chunk.first_block + s.block : row_sumsq;
      T::Add(left + s.col * col_bytes, strides, band.count, s.cols, sums[s.block], row_out, band.apart * row_step);
    }
  });
  for (int64_t b = 0; b < chunk.num_blocks; ++b) {
    chunk.sumsq[b] = Sum(local[b].sumsq);
    chunk.absmax[b] = T::Absmax(local[b]);
    chunk.bad[b] = local[b].bad;
  }
}

// The caller may have asked the processor to treat denormals as zero; the numerics contract does not.
class DefaultFloatingPoint {
 public:
#if defined(__x86_64__)
  DefaultFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatingPoint() { _mm_setcsr(saved_); }

 private:
  unsigned int saved_;
#endif
};

template <class Format>
void ReduceFormat(const Matrix& x, const Blocks& blocks, const Chunk& chunk, const ReduceOutput& out) {
  if (out.row_sumsq != nullptr) {
    WalkChunk<Format, true>(x, blocks, chunk, out);
  } else {
    WalkChunk<Format, false>(x, blocks, chunk, out);
  }
}

void ReduceChunk(const Matrix& x, const Blocks& blocks, const Chunk& chunk, const ReduceOutput& out) {
  const DefaultFloatingPoint guard;
  switch (x.dtype) {
    case DType::kFloat32:
      return ReduceFormat<Float32>(x, blocks, chunk, out);
    case DType::kBfloat16:
      return ReduceFormat<Bfloat16>(x, blocks, chunk, out);
    case DType::kFloat16:
      return ReduceFormat<Float16>(x, blocks, chunk, out);
    case DType::kFloat64:
      return ReduceFormat<Float64>(x, blocks, chunk, out);
  }
}

}  // namespace
}  // namespace pyscan
