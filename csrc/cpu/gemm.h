// The register-tiled inner product that matrix product and convolution share, and the panels that
// feed it.
//
// A is packed into panels of kRows rows, B into panels of up to kMaxPanelVecs vectors of columns;
// within a panel the reduction index is outermost, so that one step of the micro kernel reads
// kRows values of A (broadcast) and a few vectors of B, both consecutively.
#pragma once

#include <algorithm>
#include <atomic>

#include "cpu/copy_matrix.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

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

// tile (kRows x kVecs vectors, dense) = or += A panel * B panel over `depth` steps. The steps are
// summed from zero before they join the tile: shorter chains of additions round less.
template <typename Acc, int kVecs>
void micro_kernel(int64_t depth, const Acc* __restrict__ a, const Acc* __restrict__ b,
                  Acc* __restrict__ tile, bool accumulate) {
  using V = vec_t<Acc>;
  constexpr int kL = kLanes<Acc>;
  V acc[kRows][kVecs] = {};
  for (int64_t p = 0; p < depth; ++p) {
    V row[kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) row[j] = load<V>(b + j * kL);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) acc[i][j] += a[i] * row[j];
    }
    a += kRows;
    b += kVecs * kL;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) {
      Acc* out = tile + (i * kVecs + j) * kL;
      store(out, accumulate ? acc[i][j] + load<V>(out) : acc[i][j]);
    }
  }
}

// One panel of B (`vecs` wide) against `panels` panels of A, `a_stride` elements apart: fills as
// many consecutive tiles.
template <typename Acc>
void multiply_panels(int64_t depth, const Acc* a, int64_t a_stride, int64_t panels, const Acc* b,
                     int vecs, Acc* tiles, bool accumulate) {
  const int64_t tile_size = int64_t{kRows} * vecs * kLanes<Acc>;
  for (int64_t i = 0; i < panels; ++i) {
    const Acc* a_panel = a + i * a_stride;
    Acc* tile = tiles + i * tile_size;
    if (vecs == 1) {
      micro_kernel<Acc, 1>(depth, a_panel, b, tile, accumulate);
    } else if (vecs == 2) {
      micro_kernel<Acc, 2>(depth, a_panel, b, tile, accumulate);
    } else {
      micro_kernel<Acc, kMaxPanelVecs>(depth, a_panel, b, tile, accumulate);
    }
  }
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
