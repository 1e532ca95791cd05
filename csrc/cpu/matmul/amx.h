// AMX: Intel's tile registers and the instruction that multiplies tiles of bf16. Intel 64 and IA-32
// Architectures Software Developer's Manual, volume 1, chapter 18.
//
// A tile is up to 16 rows of 64 bytes. tdpbf16ps adds to a tile of 16 x 16 fp32 sums the product of
// 16 rows of 32 bf16 and 16 rows of 16 pairs of bf16: rows of a pair of B are neighbours in memory.
#pragma once

#include <cstdint>

// Assemblers of that age know the instructions.
#if defined(__AVX512F__) && defined(__x86_64__) && defined(__linux__) && \
    ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#define BRAZE_HAS_AMX 1

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace braze::cpu {

// Whether the processor has it and the system lets this process use it, which has to be asked for.
inline bool amx_available() {
  static const bool available = [] {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // OSXSAVE
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    if ((d & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return false;  // the system saves tiles
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return available;
}

struct alignas(64) TileConfig {
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// While it lives all eight tiles of the calling thread are 16 rows of 64 bytes; afterwards they are
// what they were, because other libraries configure them, too.
class WholeTiles {
 public:
  WholeTiles() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    TileConfig config;
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~WholeTiles() {
    if (before_.palette) {
      asm volatile("ldtilecfg %0" ::"m"(before_));
    } else {
      asm volatile("tilerelease");
    }
  }
  WholeTiles(const WholeTiles&) = delete;
  WholeTiles& operator=(const WholeTiles&) = delete;

 private:
  TileConfig before_;
};

#define BRAZE_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define BRAZE_TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(int64_t{stride}) : "memory")
#define BRAZE_TILE_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(int64_t{stride}) : "memory")
// sums += a * b
#define BRAZE_TILE_MULTIPLY(sums, a, b) \
  asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)

// kRowTiles x kColumnTiles tiles of sums at `out`, rows `ld` floats apart, = or += `steps` steps,
// each 32 deep, of rows of A times a panel of B. At step s the first row of A is at a(s), the
// others `a_ld` values apart; b(s) are 16 rows of pairs, `b_ld` pairs apart. aside(s) is called in
// step s, for what is to be done between the products.
template <int kRowTiles, int kColumnTiles, typename A, typename B, typename Aside>
inline void multiply_tiles(int64_t steps, const A& a, int64_t a_ld, const B& b, int64_t b_ld,
                           float* out, int64_t ld, bool accumulate, const Aside& aside) {
  constexpr bool kTwoRows = kRowTiles == 2, kTwoColumns = kColumnTiles == 2;
  const int64_t stride = ld * 4, a_stride = a_ld * 2, b_stride = b_ld * 4;
  float* const below = out + 16 * ld;
  if (accumulate) {
    BRAZE_TILE_LOAD(0, out, stride);
    if constexpr (kTwoColumns) BRAZE_TILE_LOAD(1, out + 16, stride);
    if constexpr (kTwoRows) BRAZE_TILE_LOAD(2, below, stride);
    if constexpr (kTwoRows && kTwoColumns) BRAZE_TILE_LOAD(3, below + 16, stride);
  } else {
    BRAZE_TILE_ZERO(0);
    if constexpr (kTwoColumns) BRAZE_TILE_ZERO(1);
    if constexpr (kTwoRows) BRAZE_TILE_ZERO(2);
    if constexpr (kTwoRows && kTwoColumns) BRAZE_TILE_ZERO(3);
  }
  for (int64_t s = 0; s < steps; ++s) {
    const uint16_t* const rows = a(s);
    const uint32_t* const pairs = b(s);
    BRAZE_TILE_LOAD(4, rows, a_stride);
    BRAZE_TILE_LOAD(6, pairs, b_stride);
    BRAZE_TILE_MULTIPLY(0, 4, 6);
    if constexpr (kTwoRows) {
      BRAZE_TILE_LOAD(5, rows + 16 * a_ld, a_stride);
      BRAZE_TILE_MULTIPLY(2, 5, 6);
    }
    if constexpr (kTwoColumns) {
      BRAZE_TILE_LOAD(7, pairs + 16, b_stride);
      BRAZE_TILE_MULTIPLY(1, 4, 7);
      if constexpr (kTwoRows) BRAZE_TILE_MULTIPLY(3, 5, 7);
    }
    aside(s);
  }
  BRAZE_TILE_STORE(0, out, stride);
  if constexpr (kTwoColumns) BRAZE_TILE_STORE(1, out + 16, stride);
  if constexpr (kTwoRows) BRAZE_TILE_STORE(2, below, stride);
  if constexpr (kTwoRows && kTwoColumns) BRAZE_TILE_STORE(3, below + 16, stride);
}

// The same for up to 32 rows of A and 32 columns of B, of which those tiles are left out that have
// none of `rows` and `columns`.
template <typename A, typename B, typename Aside>
inline void multiply_block(int64_t rows, int64_t columns, int64_t steps, const A& a, int64_t a_ld,
                           const B& b, int64_t b_ld, float* out, int64_t ld, bool accumulate,
                           const Aside& aside) {
  if (rows > 16) {
    columns > 16 ? multiply_tiles<2, 2>(steps, a, a_ld, b, b_ld, out, ld, accumulate, aside)
                 : multiply_tiles<2, 1>(steps, a, a_ld, b, b_ld, out, ld, accumulate, aside);
  } else {
    columns > 16 ? multiply_tiles<1, 2>(steps, a, a_ld, b, b_ld, out, ld, accumulate, aside)
                 : multiply_tiles<1, 1>(steps, a, a_ld, b, b_ld, out, ld, accumulate, aside);
  }
}
template <typename A, typename B>
inline void multiply_block(int64_t rows, int64_t columns, int64_t steps, const A& a, int64_t a_ld,
                           const B& b, int64_t b_ld, float* out, int64_t ld, bool accumulate) {
  multiply_block(rows, columns, steps, a, a_ld, b, b_ld, out, ld, accumulate, [](int64_t) {});
}

#undef BRAZE_TILE_ZERO
#undef BRAZE_TILE_LOAD
#undef BRAZE_TILE_STORE
#undef BRAZE_TILE_MULTIPLY

}  // namespace braze::cpu

#else

namespace braze::cpu {
inline bool amx_available() { return false; }
}  // namespace braze::cpu

#endif
