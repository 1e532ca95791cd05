// What the kernels of conv_bn_relu_max_pool2d.h share: filter extents, tiles of the input in shared
// memory, the format of the codes.
//
// A window is the input under a 2x2 square of convolution outputs: (R+1) x (S+1) values of each
// channel. Position j of the square, 0 to 3 in reading order, sees the window from row j / 2 and
// column j % 2 on.
#pragma once

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/parameter.cuh"
#include "launchers/conv_bn_relu_max_pool2d.h"

namespace braze::cuda {

namespace small_k {

constexpr int kFilters = 32;  // of a block: blockIdx.y picks them

// The filter extents as compile-time constants, so that patches live in registers.
template <int C_, int R_, int S_>
struct Taps {
  static constexpr int C = C_, R = R_, S = S_;
  static constexpr int K = C * R * S;
  static constexpr int kPairs = K * (K + 1) / 2;
  static constexpr int kMoments = K + kPairs;
  static constexpr int kWinH = R + 1, kWinW = S + 1, kWin = C * kWinH * kWinW;
  // 16-deep steps of a tensor-core product over a window
  static constexpr int kSteps = (kWin + 15) / 16;

  // Where tap t of position 0 lies in the window, and how much further position j's does.
  static __host__ __device__ constexpr int in_window(int t) {
    return (t / (R * S) * kWinH + t / S % R) * kWinW + t % S;
  }
  static __host__ __device__ constexpr int shift(int j) { return j / 2 * kWinW + j % 2; }
  // Where the moment of taps i <= j is among the moments.
  static __host__ __device__ constexpr int pair(int i, int j) {
    return K + i * K - i * (i - 1) / 2 + (j - i);
  }
  // The tap of position j that window element e is, or -1.
  static __host__ __device__ constexpr int tap(int e, int j) {
    const int c = e / (kWinH * kWinW), r = e / kWinW % kWinH - j / 2, s = e % kWinW - j % 2;
    const bool inside = e < kWin && r >= 0 && r < R && s >= 0 && s < S;
    return inside ? (c * R + r) * S + s : -1;
  }
};

template <typename F>
void dispatch_taps(const SmallKShape& a, F&& f) {
  if (a.r == 3 && a.s == 3) {
    if (a.c == 1) return f(Taps<1, 3, 3>{});
    if (a.c == 2) return f(Taps<2, 3, 3>{});
    if (a.c == 3) return f(Taps<3, 3, 3>{});
  }
  if (a.r == 5 && a.s == 5 && a.c == 1) return f(Taps<1, 5, 5>{});
  throw std::runtime_error("small_k: no kernel for these filter extents");
}

// Calls f(whether fp32 is multiplied as TF32), for elements of T.
template <typename T, typename F>
void dispatch_tf32(const SmallKShape& a, F&& f) {
  if constexpr (std::is_same_v<T, float>) {
    if (a.allow_tf32) return f(std::true_type{});
  }
  f(std::false_type{});
}

// 2x2 squares of convolution outputs: where the first begins, and how many there are.
struct Squares {
  int row, column, rows, columns;

  static Squares pooled(const SmallKShape& a) {
    return {0, 0, static_cast<int>(a.p / 2), static_cast<int>(a.q / 2)};
  }
};

// Tiles that keep the device busy, where blockIdx.y goes over `groups`: one to a multiprocessor, or
// nearly so, since half a tile takes more than half as long.
inline int64_t wanted_tiles(int64_t groups) { return ceil_div(sm_count() * 3 / 4, groups); }

constexpr int kMaxTileSquares = 256, kMaxTileWarps = 8;
constexpr int kMaxTileColumns = 14;  // whose input is a row of at most 32
constexpr int kMaxStagedBytes = 10 * 1024;

// Squares are dealt out in tiles of rows x columns of an image. A tile's input lies in shared
// memory, zero padding included, in rows of `pitch` elements. Holds the shape in 32 bits.
struct Tiling {
  Squares squares;
  int h, w, pad_h, pad_w, x_c, x_h, x_w;
  int64_t x_n;
  int k, words, plane;       // filters, words of codes of an output, outputs in a plane
  int tiles, bands, strips;  // in all, down and across an image
  int rows, columns;         // of a tile; those at the bottom and the right edge have fewer
  int height, pitch;         // of a tile's input
  int groups, warps;         // groups of 16 squares in a tile; warps of a block
  bool pairs, quads;  // whether 2 or 4 outputs with adjacent numbers, the first a multiple of
                      // 2 or 4, are adjacent in NCHW memory and aligned like a vector
  FastDiv by_columns, by_strips, by_bands;

  // Tiles get smaller until there are `wanted`, or until their input, of elements of that many
  // bytes, is small enough.
  Tiling(const SmallKShape& a, const Squares& squares, int64_t wanted, int element_bytes);

  __host__ __device__ int staged(int channels) const { return channels * height * pitch; }
};

inline Tiling::Tiling(const SmallKShape& a, const Squares& squares, int64_t wanted,
                      int element_bytes)
    : squares(squares),
      h(static_cast<int>(a.h)),
      w(static_cast<int>(a.w)),
      pad_h(static_cast<int>(a.pad_h)),
      pad_w(static_cast<int>(a.pad_w)),
      x_c(static_cast<int>(a.x_c)),
      x_h(static_cast<int>(a.x_h)),
      x_w(static_cast<int>(a.x_w)),
      x_n(a.x_n),
      k(static_cast<int>(a.k)),
      words(static_cast<int>(ceil_div(a.k, 8))),
      plane(static_cast<int>((a.p / 2) * (a.q / 2))) {
  columns = squares.columns;
  if (columns > kMaxTileColumns) {  // multiples of 4, for the sake of quads
    const auto unused = [&](int width) { return (width - squares.columns % width) % width; };
    columns = unused(8) < unused(12) ? 8 : 12;
  }
  strips = static_cast<int>(ceil_div(squares.columns, columns));
  rows = std::min(squares.rows, kMaxTileSquares / columns);
  const auto too_large = [&] {
    const int64_t elements = a.c * (2 * rows + a.r - 1) * (2 * columns + a.s);
    return elements * element_bytes > kMaxStagedBytes ||
           a.n * strips * ceil_div(squares.rows, rows) < wanted;
  };
  while (rows > 2 && too_large()) rows = (rows + 3) / 4 * 2;  // even, for the sake of pairs
  bands = static_cast<int>(ceil_div(squares.rows, rows));
  tiles = static_cast<int>(a.n * bands * strips);
  height = 2 * rows + static_cast<int>(a.r) - 1;
  pitch = (2 * columns + static_cast<int>(a.s)) / 2 * 2;  // even: windows begin at even columns
  groups = static_cast<int>(ceil_div(rows * columns, 16));
  warps = static_cast<int>(ceil_div(groups, ceil_div(groups, kMaxTileWarps)));
  const auto adjacent = [&](int count) {
    if (strips > 1) return squares.columns % count == 0;
    return plane % count == 0 && (bands == 1 || rows * columns % count == 0);
  };
  pairs = adjacent(2);
  quads = adjacent(4);
  by_columns = FastDiv(columns);
  by_strips = FastDiv(strips);
  by_bands = FastDiv(bands);
}

// The tile that a block works on.
struct Tile {
  int image;
  int row, column;    // of its first square
  int rows, columns;  // squares it really has

  __device__ __forceinline__ Tile(const Tiling& tiling, int index) {
    int band, strip;
    image = tiling.by_bands.div(tiling.by_strips.div(index, strip), band);
    row = band * tiling.rows;
    column = strip * tiling.columns;
    rows = min(tiling.rows, tiling.squares.rows - row);
    columns = min(tiling.columns, tiling.squares.columns - column);
  }

  // Square `number` of the tile: its place in the pooled plane, and where its window begins in
  // shared memory. Numbers that are no square begin at 0 and return false.
  __device__ __forceinline__ bool locate(const Tiling& tiling, int number, int* in_plane,
                                         int* corner) const {
    int c;
    const int r = tiling.by_columns.div(number, c);
    const bool valid = r < rows && c < columns;
    *in_plane = (row + r) * tiling.squares.columns + column + c;
    *corner = valid ? 2 * (r * tiling.pitch + c) : 0;
    return valid;
  }
};

// A block's tiles, one after the other, and in each the warp's groups of outputs.
struct Cursor {
  int index, group;

  __device__ __forceinline__ bool next(const Tiling& tiling, int groups) {
    group += tiling.warps;
    if (group < groups) return true;
    group = static_cast<int>(threadIdx.x / 32);
    index += static_cast<int>(gridDim.x);
    return index < tiling.tiles;
  }
};

// What InputLoader copies: a tensor of T.
template <typename T>
class TensorPixels {
 public:
  // 16-bit values in whole registers: a half of one is set to zero after the load is back, and so
  // would wait for it.
  using Raw = std::conditional_t<sizeof(T) == 2, uint16_t, T>;
  using Held = std::conditional_t<sizeof(T) == 2, uint32_t, T>;
  static constexpr int kOutside = 0;  // what is held in place of a pixel outside the image

  __device__ __forceinline__ TensorPixels(const Tiling& tiling, const T* x)
      : tiling_(tiling), x_(x) {}
  // Called for an image before its pixels are loaded.
  __device__ __forceinline__ const Raw* image(int n) const {
    return reinterpret_cast<const Raw*>(x_ + n * tiling_.x_n);
  }
  // A pixel of the image that was loaded last, or its padding.
  __device__ __forceinline__ T value(Held held, int /*channel*/) const {
    const Raw raw = static_cast<Raw>(held);
    return reinterpret_cast<const T&>(raw);
  }

 private:
  const Tiling& tiling_;
  const T* x_;
};

// Copies tiles of input to shared memory, a row to a warp. load() only starts the loads, kAhead of
// a warp's rows, so that they are under way during other work.
template <typename Tp, typename Pixels, int kAhead = 5>
class InputLoader {
 public:
  __device__ __forceinline__ InputLoader(const Tiling& tiling, const Pixels& pixels)
      : tiling_(tiling),
        pixels_(pixels),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        warps_(blockDim.x / 32) {}

  __device__ __forceinline__ void load(const Tile& tile) {
    const Source from(*this, tile, warp_);
#pragma unroll
    for (int c = 0; c < Tp::C; ++c) {
      const Raw* row = from.row + int64_t{c} * tiling_.x_c;
#pragma unroll
      for (int i = 0; i < kAhead; ++i, row += int64_t{warps_} * tiling_.x_h) {
        ahead_[c][i] = Held(Pixels::kOutside);
        if (from.inside(i * warps_)) ahead_[c][i] = *row;
      }
    }
  }

  // `put(i, value)` stores element i of the tile.
  template <typename Put>
  __device__ __forceinline__ void store(const Tile& tile, const Put& put) {
    if (lane_ >= tiling_.pitch) return;
#pragma unroll
    for (int c = 0; c < Tp::C; ++c) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int row = warp_ + i * warps_;
        if (row < tiling_.height) put(element(c, row), pixels_.value(ahead_[c][i], c));
      }
      for (int row = warp_ + kAhead * warps_; row < tiling_.height; row += warps_) {
        const Source from(*this, tile, row);
        const Raw* source = from.row + int64_t{c} * tiling_.x_c;
        put(element(c, row),
            pixels_.value(from.inside(0) ? Held(*source) : Held(Pixels::kOutside), c));
      }
    }
  }

 private:
  using Raw = typename Pixels::Raw;
  using Held = typename Pixels::Held;

  // Where a lane reads its element of a row of the tile's input, in the first channel.
  struct Source {
    int h, rows;  // row of the image; where the rows to load end, 0 for lanes outside
    const Raw* row;

    __device__ __forceinline__ Source(InputLoader& loader, const Tile& tile, int from) {
      const Tiling& tiling = loader.tiling_;
      const int top = tiling.squares.row + 2 * tile.row - tiling.pad_h;
      const int w = tiling.squares.column + 2 * tile.column - tiling.pad_w + loader.lane_;
      const Raw* const image = loader.pixels_.image(tile.image);
      h = top + from;
      rows = static_cast<unsigned>(w) < static_cast<unsigned>(tiling.w)
                 ? min(tiling.h, top + tiling.height)
                 : 0;
      row = image + int64_t{h} * tiling.x_h + int64_t{w} * tiling.x_w;
    }
    __device__ __forceinline__ bool inside(int further) const {
      return h + further >= 0 && h + further < rows;
    }
  };

  __device__ __forceinline__ int element(int c, int row) const {
    return (c * tiling_.height + row) * tiling_.pitch + lane_;
  }

  const Tiling& tiling_;
  Pixels pixels_;
  int lane_, warp_, warps_;
  Held ahead_[Tp::C][kAhead];
};

// Where window element e lies in a staged tile, from the window's corner on.
template <typename Tp>
__device__ __forceinline__ int staged_offset(const Tiling& tiling, int e) {
  const int c = e / (Tp::kWinH * Tp::kWinW), r = e / Tp::kWinW % Tp::kWinH, s = e % Tp::kWinW;
  return (c * tiling.height + r) * tiling.pitch + s;
}

// The code of a pooled output: three bits, each in a byte of its own of the word that eight filters
// share, the first filter's in the byte's top bit. A shift by a filter's number (0 to 7) brings its
// bits to the tops of the bytes, from where one instruction spreads them to masks.
struct Codes {
  static constexpr int kRight = 0, kBelow = 1, kActive = 2;  // bytes of a word
  // Active: the gradient passes ReLU. Right, below: the maximum's place in the 2x2 square.
  uint32_t right = 0, below = 0, active = 0;

  // Appends a filter's bits, given as the signs of three words.
  __device__ __forceinline__ void append(uint32_t right_sign, uint32_t below_sign,
                                         uint32_t active_sign) {
    right = __funnelshift_l(right_sign, right, 1);
    below = __funnelshift_l(below_sign, below, 1);
    active = __funnelshift_l(active_sign, active, 1);
  }
  __device__ __forceinline__ uint32_t word() const { return right | below << 8 | active << 16; }
};

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}

// The sum of values[i * pitch] for i = first, first + step, ... below count, in this order; many
// loads at once.
template <int kAtOnce>
__device__ __forceinline__ double strided_sum(const double* values, int64_t pitch, int first,
                                              int step, int count) {
  double sum = 0;
  for (int i = first; i < count; i += kAtOnce * step) {
    double loaded[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      loaded[u] = i + u * step < count ? values[(i + u * step) * pitch] : 0;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) sum += loaded[u];
  }
  return sum;
}

}  // namespace small_k
}  // namespace braze::cuda
