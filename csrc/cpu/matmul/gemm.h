// The register-tiled inner product that matrix product and convolution share, and the panels that
// feed it.
//
// A is packed into panels of kRows rows, B into panels of up to kMaxPanelVecs vectors of columns;
// within a panel the reduction index is outermost, so that one step of the micro kernel reads
// kRows values of A (broadcast) and a few vectors of B, both consecutively.
#pragma once

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "cpu/common/copy_matrix.h"
#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"

namespace braze::cpu {

// The tile of accumulators: kRows x kMaxPanelVecs vector registers, with room left for one row of B
// and a broadcast value of A. 32 registers with AVX-512, 16 below.
#if defined(__AVX512F__)
constexpr int kRows = 8, kMaxPanelVecs = 3;
#elif defined(__AVX2__)
constexpr int kRows = 4, kMaxPanelVecs = 3;
#else
constexpr int kRows = 4, kMaxPanelVecs = 2;
#endif

template <typename Acc>
constexpr int kMaxPanelWidth = kMaxPanelVecs * kLanes<Acc>;

// Steps of the reduction between two visits of an accumulator tile in memory: a panel of B of that
// depth is 48 KiB at most, which the second-level cache streams fast enough.
constexpr int64_t kDepth = 256;

// Packed B of a batch beyond this many bytes is made and used a few matrices at a time.
constexpr int64_t kPackedBytes = int64_t{4} << 20;

inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Columns [0, n) split into panels of whole vectors, as even in width as possible: 4 vectors are
// 2 + 2, not 3 + 1. Only the last panel may reach beyond n.
template <typename Acc>
class Panels {
 public:
  explicit Panels(int64_t n)
      : n_(n),
        vecs_(ceil_div(n, kLanes<Acc>)),
        count_(ceil_div(vecs_, kMaxPanelVecs)),
        narrow_(count_ ? vecs_ / count_ : 0),
        wide_(count_ ? vecs_ % count_ : 0) {}
  int64_t count() const { return count_; }
  int vecs(int64_t i) const { return static_cast<int>(narrow_ + (i < wide_)); }
  int64_t width(int64_t i) const { return vecs(i) * int64_t{kLanes<Acc>}; }
  int64_t begin(int64_t i) const {
    return (i * narrow_ + std::min(i, wide_)) * int64_t{kLanes<Acc>};
  }
  int64_t columns(int64_t i) const { return std::min(width(i), n_ - begin(i)); }
  int64_t padded() const { return vecs_ * kLanes<Acc>; }  // the width of all panels

 private:
  int64_t n_, vecs_, count_, narrow_, wide_;
};

// Where a tile of vectors goes: to rows at `out`, `ld` apart, = or +=. kCold: of a result that is
// in no cache. What the next tile, behind this one, is going to write comes closer meanwhile:
// stores that miss wait for few lines at a time.
template <typename Acc, bool kCold = false>
struct TileOfSums {
  Acc* out;
  int64_t ld;
  bool accumulate;

  template <int kRows, int kVecs>
  void store(const vec_t<Acc> (&tile)[kRows][kVecs]) const {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) {
        Acc* const to = out + i * ld + j * kLanes<Acc>;
        if constexpr (kCold) __builtin_prefetch(to + kRows * ld, 1, 3);
        cpu::store(to, accumulate ? tile[i][j] + load<vec_t<Acc>>(to) : tile[i][j]);
      }
    }
  }
};

// sum += a, broadcast, times b.
template <typename Acc>
inline void add_product(vec_t<Acc>& sum, Acc a, const vec_t<Acc>& b) {
  sum += a * b;
}

// A tile of kScalars x kVecs vectors: the sum over `depth` steps of kScalars values, `stride` apart
// and each broadcast, times kVecs vectors; scalars(p) and vectors(p) point at those of step p. The
// steps are summed from zero before they join what is there: shorter chains of additions round
// less. A step is what add_product takes at once: a value, or a pair of bf16.
// Never inlined: within a larger function gcc 12 keeps some tiles in memory, not in registers. The
// tile's place by reference: a copy of it on the stack would be read in larger pieces than it was
// written in, and such a read waits until every store before it has left, the last tile's too.
template <typename Acc, int kScalars, int kVecs, typename Scalars, typename Stride,
          typename Vectors, typename Tile>
__attribute__((noinline)) void outer_products(int64_t depth, const Scalars& scalars, Stride stride,
                                              const Vectors& vectors, const Tile& tile) {
  using V = vec_t<Acc>;
  // Rows of A are addressed in fours, from a register that has the first one's address.
  constexpr int kGroup = 4;
  V acc[kScalars][kVecs] = {};
  for (int64_t p = 0; p < depth; ++p) {
    const auto* a = scalars(p);
    const Acc* b = vectors(p);
    V values[kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) values[j] = load<V>(b + j * kLanes<Acc>);
#pragma GCC unroll 16
    for (int i = 0; i < kScalars; ++i) {
      const auto* group = a + i / kGroup * (kGroup * stride);
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) {
        add_product(acc[i][j], group[i % kGroup * stride], values[j]);
      }
    }
  }
  tile.store(acc);
}

// The same to rows at `out`, `ld` apart: = or +=.
template <typename Acc, int kScalars, int kVecs, typename Scalars, typename Stride,
          typename Vectors>
inline void outer_products(int64_t depth, const Scalars& scalars, Stride stride,
                           const Vectors& vectors, Acc* out, int64_t ld, bool accumulate) {
  outer_products<Acc, kScalars, kVecs>(depth, scalars, stride, vectors,
                                       TileOfSums<Acc>{out, ld, accumulate});
}

using Adjacent = std::integral_constant<int64_t, 1>;

// A panel of A times the rows of B at row(p).
template <typename Acc, int kPanelRows, int kVecs, typename Row>
inline void micro_kernel(int64_t depth, const Acc* __restrict__ a, const Row& row,
                         Acc* __restrict__ out, int64_t ld, bool accumulate) {
  const auto panel = [a](int64_t p) { return a + p * kPanelRows; };
  outer_products<Acc, kPanelRows, kVecs>(depth, panel, Adjacent{}, row, out, ld, accumulate);
}

// The same with the reduction's vectors on the other side: kPixels adjacent values of B, each
// broadcast, times kVecs vectors of packed A, into tiles [pixel][kVecs vectors] whose rows are `ld`
// apart. No lane is wasted on an odd number of pixels.
template <typename Acc, int kPixels, int kVecs, typename Row>
inline void broadcast_kernel(int64_t depth, const Acc* __restrict__ a, const Row& row,
                             Acc* __restrict__ out, int64_t ld, bool accumulate) {
  const auto panel = [a](int64_t p) { return a + p * kVecs * kLanes<Acc>; };
  outer_products<Acc, kPixels, kVecs>(depth, row, Adjacent{}, panel, out, ld, accumulate);
}

// kRows rows of A where they are, `a_ld` steps apart, times a panel of B of kVecs vectors: A is
// never packed. Meanwhile `each` bytes a step at `ahead` come closer.
template <typename Acc, int kRows, int kVecs, typename Step, typename Tile>
inline void rows_kernel(int64_t depth, const Step* __restrict__ a, int64_t a_ld,
                        const Acc* __restrict__ b, const char* ahead, int64_t each,
                        const Tile& tile) {
  outer_products<Acc, kRows, kVecs>(
      depth, [a](int64_t p) { return a + p; }, a_ld,
      [=](int64_t p) {
        __builtin_prefetch(ahead + p * each, 0, 2);
        return b + p * kVecs * kLanes<Acc>;
      },
      tile);
}

// Pixels of a tile of broadcast_kernel: more than half of the most, so that rows of any length from
// there on split into tiles of one size that overlap little.
#if defined(__AVX512F__)
constexpr int kMostPixels = 14;
#else
constexpr int kMostPixels = 6;
#endif
constexpr int kLeastPixels = kMostPixels / 2 + 1;

// Calls f(pixels, vecs) with both as std::integral_constant, `vecs` being 1 or 2, for kLeast pixels
// or more.
template <int kLeast = kLeastPixels, int kPixels = kMostPixels, typename F>
inline void with_pixels(int64_t pixels, int64_t vecs, const F& f) {
  if constexpr (kPixels > kLeast) {
    if (pixels < kPixels) return with_pixels<kLeast, kPixels - 1>(pixels, vecs, f);
  }
  const std::integral_constant<int, kPixels> tag{};
  if (vecs == 1) return f(tag, std::integral_constant<int, 1>{});
  f(tag, std::integral_constant<int, 2>{});
}

// Calls f(rows, vecs) with both as std::integral_constant, so that kernels are compiled for each
// size of register tile: `rows` is a power of two up to kRows, `vecs` at most kMaxPanelVecs.
template <typename F>
inline void with_tile(int rows, int vecs, const F& f) {
  const auto with_rows = [&](auto vecs_tag) {
    using std::integral_constant;
    switch (rows) {
      case 1: return f(integral_constant<int, 1>{}, vecs_tag);
      case 2: return f(integral_constant<int, 2>{}, vecs_tag);
      case 4: return f(integral_constant<int, 4>{}, vecs_tag);
      default: return f(integral_constant<int, kRows>{}, vecs_tag);
    }
  };
  switch (vecs) {
    case 1: return with_rows(std::integral_constant<int, 1>{});
    case 2: return with_rows(std::integral_constant<int, 2>{});
    default: return with_rows(std::integral_constant<int, kMaxPanelVecs>{});
  }
}

// Rows of a panel of A for a matrix of `rows` rows: kRows, or fewer where most would be padding.
inline int panel_rows(int64_t rows) {
  int size = 1;
  while (size < kRows && size < rows) size *= 2;
  return size;
}

// `rows` rows of A where they are times a packed panel of B, one or two vectors wide: to = or +=.
// `depth` steps of A are a row, in which the panel's rows are `width` wide. What follows a part of
// the panel in memory, its next part or the next panel, is prefetched meanwhile; or, of rows that
// are `cold`, which nobody has read yet, those behind the ones at work. last(i, adds): where the
// tile from row i on goes behind the last step, if not to `to`, which has earlier sums if it adds.
template <typename Acc, typename Step, typename Last>
void rows_times_panel(const Step* a, int64_t a_ld, int64_t rows, const Acc* panel, int64_t width,
                      int64_t depth, Acc* to, int64_t ld, bool accumulate, bool cold,
                      const Last& last) {
  if (rows == 0) return;
  if (depth == 0 && !accumulate) {
    for (int64_t i = 0; i < rows; ++i) std::fill_n(to + i * ld, width, Acc(0));
  }
  // Tiles of even height, but for the last.
  const int64_t count = ceil_div(rows, kMostPixels), height = ceil_div(rows, count);
  const int64_t whole = rows / height;
  for (int64_t p = 0; p < depth; p += kDepth) {
    const int64_t steps = std::min(kDepth, depth - p);
    const int64_t each = cold ? ceil_div(height * a_ld * int64_t{sizeof(Step)}, depth)
                              : width * int64_t{sizeof(Acc)} / count;  // bytes of what follows
    const char* ahead = reinterpret_cast<const char*>(panel + (p + steps) * width);
    const auto multiply = [&](int64_t first, int64_t tiles, int64_t tile_rows) {
      with_pixels<1>(tile_rows, width / kLanes<Acc>, [&](auto rows_tag, auto vecs_tag) {
        for (int64_t i = first; i < first + tiles * rows_tag; i += rows_tag) {
          if (cold) ahead = reinterpret_cast<const char*>(a + (i + rows_tag) * a_ld);
          const auto run = [&](const auto& tile) {
            rows_kernel<Acc, rows_tag, vecs_tag>(steps, a + i * a_ld + p, a_ld, panel + p * width,
                                                 ahead, each, tile);
          };
          if (p + steps < depth) {
            run(TileOfSums<Acc>{to + i * ld, ld, accumulate || p > 0});
          } else {
            run(last(i, accumulate || p > 0));
          }
          ahead += each * steps;
        }
      });
    };
    multiply(0, whole, height);
    if (whole * height < rows) multiply(whole * height, 1, rows - whole * height);
  }
}

// The same to a result that is in no cache.
template <typename Acc, typename Step>
void rows_times_panel_to(Acc* result, int64_t ld, const Step* a, int64_t a_ld, int64_t rows,
                         const Acc* panel, int64_t width, int64_t depth, bool cold = false) {
  rows_times_panel(
      a, a_ld, rows, panel, width, depth, result, ld, false, cold,
      [=](int64_t i, bool adds) { return TileOfSums<Acc, true>{result + i * ld, ld, adds}; });
}
// The same to sums that are.
template <typename Acc, typename Step>
void rows_times_panel(const Step* a, int64_t a_ld, int64_t rows, const Acc* panel, int64_t width,
                      int64_t depth, Acc* to, int64_t ld, bool accumulate = false,
                      bool cold = false) {
  rows_times_panel(a, a_ld, rows, panel, width, depth, to, ld, accumulate, cold,
                   [=](int64_t i, bool adds) { return TileOfSums<Acc>{to + i * ld, ld, adds}; });
}

// Columns of the left operand of columns_times_columns in a panel: even tiles of kMostPixels at
// most, or of as many as the caller says.
inline int64_t even_height(int64_t columns, int64_t most = kMostPixels) {
  return columns ? ceil_div(columns, ceil_div(columns, most)) : 1;
}

// rows x columns sums, `ld` apart, = or += the products of columns of A and columns of B, over
// `depth` steps of both. Column i begins a panel at i * capacity; in it the columns of a step lie
// side by side. Panels of A are even_height(rows) wide, those of B two vectors, the last ones what
// is left; columns come in whole vectors.
template <typename Acc, typename Step>
void columns_times_columns(int64_t depth, int64_t capacity, const Step* a, int64_t rows,
                           const Acc* b, int64_t columns, Acc* sums, int64_t ld, bool accumulate) {
  const int64_t height = even_height(rows), vecs = columns / kLanes<Acc>;
  for (int64_t j = 0; j < vecs; j += 2) {
    const Acc* const right = b + j * kLanes<Acc> * capacity;
    for (int64_t i = 0; i < rows; i += height) {
      const Step* const left = a + i * capacity;
      const auto multiply = [&](auto rows_tag, auto vecs_tag) {
        outer_products<Acc, rows_tag, vecs_tag>(
            depth, [=](int64_t p) { return left + p * rows_tag; }, Adjacent{},
            [=](int64_t p) { return right + p * vecs_tag * kLanes<Acc>; },
            sums + i * ld + j * kLanes<Acc>, ld, accumulate);
      };
      with_pixels<1>(std::min(height, rows - i), std::min<int64_t>(2, vecs - j), multiply);
    }
  }
}

// A panel of B, `vecs` wide, whose rows are `ld` apart; packed, or in the matrix itself. While a
// packed one is multiplied, `next_size` elements at `next`, the panel after it, come closer: the
// first panel of A would else wait for all of it.
template <typename Acc>
struct ColumnPanel {
  const Acc* first;
  int64_t ld;
  int vecs;
  const Acc* next = nullptr;
  int64_t next_size = 0;
};

// Where the tiles of consecutive panels of A go: `step` elements apart, their rows `ld`.
template <typename Acc>
struct TileColumn {
  Acc* first;
  int64_t ld, step;
};

// One panel of B against `panels` panels of A of `rows` rows, one after the other: fills as many
// tiles.
template <typename Acc>
void multiply_panels(int64_t depth, const Acc* a, int rows, int64_t panels,
                     const ColumnPanel<Acc>& b, const TileColumn<Acc>& tiles, bool accumulate) {
  if (panels == 0) return;
  with_tile(rows, b.vecs, [&](auto rows_tag, auto vecs_tag) {
    constexpr int64_t kWidth = vecs_tag * kLanes<Acc>;
    const auto multiply = [&](int64_t i, const auto& row) {
      micro_kernel<Acc, rows_tag, vecs_tag>(depth, a + i * rows_tag * depth, row,
                                            tiles.first + i * tiles.step, tiles.ld, accumulate);
    };
    const Acc* const first = b.first;
    if (b.ld != kWidth) {
      const int64_t ld = b.ld;
      for (int64_t i = 0; i < panels; ++i) multiply(i, [=](int64_t p) { return first + p * ld; });
      return;
    }
    const int64_t share = b.next_size * int64_t{sizeof(Acc)} / panels, each = share / depth;
    for (int64_t i = 0; i < panels; ++i) {
      const char* const ahead = reinterpret_cast<const char*>(b.next) + i * share;
      multiply(i, [=](int64_t p) {
        __builtin_prefetch(ahead + p * each, 0, 2);
        return first + p * kWidth;
      });
    }
  });
}

// Packs `lanes` rows of A (or columns of B) into a panel `width` wide; the rest is zero.
template <typename T>
void pack_panel(acc_t<T>* dst, int64_t width, const T* src, int64_t lane_stride,
                int64_t depth_stride, int64_t lanes, int64_t depth) {
  copy_matrix(dst, width, src, depth_stride, lane_stride, depth, lanes);
  if (lanes == width) return;
  for (int64_t p = 0; p < depth; ++p) {
    std::fill(dst + p * width + lanes, dst + (p + 1) * width, acc_t<T>(0));
  }
}

template <typename T>
inline T relu_if(bool relu, acc_t<T> value) {
  return T(relu && value < 0 ? acc_t<T>(0) : value);
}

// Calls f(worker, task) once for each task; at most one task runs per worker at a time, so that
// scratch memory can be kept per worker. Tasks are handed out as workers become free.
template <typename F>
void for_each_task(int64_t tasks, const F& f) {
  std::atomic<int64_t> next{0};
  parallel_for(0, std::min(tasks, num_threads()), 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker) {
      for (int64_t task = next++; task < tasks; task = next++) f(worker, task);
    }
  });
}

}  // namespace braze::cpu
