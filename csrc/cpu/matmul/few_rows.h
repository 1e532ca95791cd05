// Products that read or write a large matrix once, as those of a linear layer do with a few
// samples: memory decides, and packing it would be another trip. Each of the layer's three passes
// goes through the large matrix in the order in which it lies: dot products with its rows
// (forward), sums of wide pieces of its rows (input gradient), or its rows written a few at a time
// (weight gradient).
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"
#include "cpu/matmul/epilogue.h"
#include "cpu/matmul/gemm.h"
#include "launchers/matmul.h"

namespace braze::cpu {

constexpr int64_t kFewRows = 8;         // of A, or the depth of a weight gradient
constexpr int64_t kFewGrain = 1 << 15;  // multiply-adds that a task has at least
constexpr int64_t kStored = 32;         // columns that the epilogue gets at once

enum class FewRows { kNone, kDots, kStripes, kOuter };

// Which of them a product is for, by its shape and strides: a plan serves any epilogue. Their
// element type is that of the sums.
inline FewRows few_rows_of(const MatmulArgs& args) {
  const bool plain = args.dtype == DType::kFloat32 || args.dtype == DType::kFloat64;
  if (!plain || args.k == 0 || args.n * args.k * args.m < 4 * kFewGrain) return FewRows::kNone;
  if (args.m <= kFewRows && args.b.row == 1 && args.a.col == 1) return FewRows::kDots;
  // Smaller ones are in a cache, where they are packed as they are read.
  const bool large = args.n * args.k >= int64_t{1} << 20;
  const bool stripes = args.m <= kFewRows && args.b.col == 1 && args.n >= 2 * 256 && large;
  if (stripes) return FewRows::kStripes;
  if (args.k <= kFewRows && args.b.col == 1 && args.m >= 32) return FewRows::kOuter;
  return FewRows::kNone;
}

// sums[i * width + j] = row i of A times column j of B, for kR rows at `a` and kC columns at `b`.
// Sums of up to 256 steps join the others when they are done: shorter chains round less.
template <typename T, int kR, int kC>
__attribute__((noinline)) void dot_products(int64_t depth, const T* const (&a)[kR],
                                            const T* const (&b)[kC], T* sums, int64_t width) {
  using V = vec_t<T>;
  constexpr int64_t kBlock = 256 * kLanes<T>;
  T total[kR][kC] = {};
  const int64_t whole = depth / kLanes<T> * kLanes<T>;
  for (int64_t first = 0; first < whole; first += kBlock) {
    V acc[kR][kC] = {};
    const int64_t last = std::min(whole, first + kBlock);
    for (int64_t p = first; p < last; p += kLanes<T>) {
      V x[kR];
#pragma GCC unroll 8
      for (int i = 0; i < kR; ++i) x[i] = load<V>(a[i] + p);
#pragma GCC unroll 8
      for (int j = 0; j < kC; ++j) {
        const V y = load<V>(b[j] + p);
#pragma GCC unroll 8
        for (int i = 0; i < kR; ++i) acc[i][j] += x[i] * y;
      }
    }
    for (int i = 0; i < kR; ++i) {
      for (int j = 0; j < kC; ++j) {
        T lanes[kLanes<T>];
        store(lanes, acc[i][j]);
        for (int half = kLanes<T> / 2; half > 0; half /= 2) {
          for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
        }
        total[i][j] += lanes[0];
      }
    }
  }
  for (int i = 0; i < kR; ++i) {
    for (int j = 0; j < kC; ++j) {
      for (int64_t p = whole; p < depth; ++p) total[i][j] += a[i][p] * b[j][p];
      sums[i * width + j] = total[i][j];
    }
  }
}

// `columns` columns of C, up to kWidth, for all rows.
template <typename T, int64_t kWidth, int kR>
void dot_columns(const MatmulArgs& args, const T* a, const T* b, int64_t columns, T* sums) {
  constexpr int kC = 4;
  for (int64_t j = 0; j < columns; j += kC) {
    // Where there are no more, the last one again; what that makes is written over or left.
    const T* columns_of_b[kC];
    for (int c = 0; c < kC; ++c) columns_of_b[c] = b + std::min(j + c, columns - 1) * args.b.col;
    for (int64_t i = 0; i < args.m; i += kR) {
      const T* rows[kR];
      for (int r = 0; r < kR; ++r) rows[r] = a + std::min(i + r, args.m - 1) * args.a.row;
      T tile[kR * kC];
      dot_products<T, kR, kC>(args.k, rows, columns_of_b, tile, kC);
      for (int64_t r = 0; r < std::min<int64_t>(kR, args.m - i); ++r) {
        std::copy_n(tile + r * kC, std::min<int64_t>(kC, columns - j), sums + (i + r) * kWidth + j);
      }
    }
  }
}

// store(sums, width, matrix, first row, rows, column, columns): the epilogue.
template <typename T, typename Store>
void few_rows_by_dots(const MatmulArgs& args, const Store& store) {
  constexpr int64_t kWidth = kStored;
  const int64_t groups = ceil_div(args.n, kWidth);
  const int64_t each = kWidth * args.k * args.m;
  parallel_for(0, args.batch * groups, ceil_div(kFewGrain, each), [&](int64_t begin, int64_t end) {
    T sums[kFewRows * kWidth];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t matrix = task / groups, column = task % groups * kWidth;
      const int64_t columns = std::min(kWidth, args.n - column);
      const T* const a = static_cast<const T*>(args.a.data) + matrix * args.a.batch;
      const T* const b =
          static_cast<const T*>(args.b.data) + matrix * args.b.batch + column * args.b.col;
      // 16 accumulators and what they are made from: more rows at once spill without AVX-512.
      constexpr int kMost = sizeof(vec_t<T>) >= 64 ? 4 : 2;
      args.m == 1                 ? dot_columns<T, kWidth, 1>(args, a, b, columns, sums)
      : args.m == 2 || kMost == 2 ? dot_columns<T, kWidth, 2>(args, a, b, columns, sums)
                                  : dot_columns<T, kWidth, kMost>(args, a, b, columns, sums);
      store(sums, kWidth, matrix, 0, args.m, column, columns);
    }
  });
}

// Rows of C at `c`, `c_ld` apart, = or += `depth` steps of `rows` values of A times rows of B. A
// step's values are `stride` apart, steps `step` apart. Columns that fill no vector come one by
// one.
template <typename T>
void add_outer_products(int64_t depth, int rows, const T* a, int64_t stride, int64_t step,
                        const T* b, int64_t b_ld, int64_t columns, T* c, int64_t c_ld,
                        bool accumulate) {
  const int64_t vecs = columns / kLanes<T>;
  for (int64_t v = 0; v < vecs; v += kMaxPanelVecs) {
    const int64_t j = v * kLanes<T>;
    with_tile(rows, static_cast<int>(std::min<int64_t>(kMaxPanelVecs, vecs - v)),
              [&](auto tile_rows, auto tile_vecs) {
                outer_products<T, tile_rows.value, tile_vecs.value>(
                    depth, [=](int64_t p) { return a + p * step; }, stride,
                    [=](int64_t p) { return b + p * b_ld + j; }, c + j, c_ld, accumulate);
              });
  }
  for (int64_t j = vecs * kLanes<T>; j < columns; ++j) {
    for (int i = 0; i < rows; ++i) {
      T sum = accumulate ? c[i * c_ld + j] : T(0);
      for (int64_t p = 0; p < depth; ++p) sum += a[p * step + i * stride] * b[p * b_ld + j];
      c[i * c_ld + j] = sum;
    }
  }
}

// Rows of A in groups for which there are tiles: f(first, how many).
template <typename F>
void for_row_groups(int64_t rows, const F& f) {
  for (int64_t i = 0; i < rows;) {
    int group = kRows;
    while (group > rows - i) group /= 2;
    f(i, group);
    i += group;
  }
}

template <typename T, typename Store>
void few_rows_by_stripes(const MatmulArgs& args, const Store& store) {
  constexpr int64_t kWidth = 5 * kMaxPanelWidth<T>, kBlock = 16;
  // As many for one thread as for any other.
  const int64_t most = num_threads(), wanted = ceil_div(ceil_div(args.n, kWidth), most) * most;
  const int64_t width = ceil_div(ceil_div(args.n, wanted), kLanes<T>) * kLanes<T>;
  const int64_t groups = ceil_div(args.n, width), ld = args.b.row;
  parallel_for(0, args.batch * groups, 1, [&](int64_t begin, int64_t end) {
    T sums[kFewRows * kWidth];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t matrix = task / groups, column = task % groups * width;
      const int64_t columns = std::min(width, args.n - column);
      const T* const a = static_cast<const T*>(args.a.data) + matrix * args.a.batch;
      const T* const b = static_cast<const T*>(args.b.data) + matrix * args.b.batch + column;
      for (int64_t p = 0; p < args.k; p += kBlock) {
        const int64_t depth = std::min(kBlock, args.k - p);
        // Rows are apart: each has to be asked for before it is come to.
        for (int64_t next = p + depth; next < std::min(args.k, p + depth + kBlock); ++next) {
          for (int64_t j = 0; j < columns; j += 64 / int64_t{sizeof(T)}) {
            __builtin_prefetch(b + next * ld + j, 0, 2);
          }
        }
        for_row_groups(args.m, [&](int64_t i, int rows) {
          add_outer_products(depth, rows, a + i * args.a.row + p * args.a.col, args.a.row,
                             args.a.col, b + p * ld, ld, columns, sums + i * kWidth, kWidth, p > 0);
        });
      }
      for (int64_t j = 0; j < columns; j += kStored) {
        store(sums + j, kWidth, matrix, 0, args.m, column + j, std::min(kStored, columns - j));
      }
    }
  });
}

// Without an epilogue, which a weight gradient has not, sums go to C at once.
template <typename T, typename Store>
void few_depths_by_rows(const MatmulArgs& args, const Store& store) {
  const bool direct = !args.bias && !args.relu && !changes_values(args);
  const int64_t width = direct ? args.n : kStored;
  const int64_t groups = ceil_div(args.m, kRows), ld = args.b.row;
  const int64_t each = kRows * args.n * args.k;
  parallel_for(0, args.batch * groups, ceil_div(kFewGrain, each), [&](int64_t begin, int64_t end) {
    T sums[kRows * kStored];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t matrix = task / groups, first = task % groups * kRows;
      const T* const a =
          static_cast<const T*>(args.a.data) + matrix * args.a.batch + first * args.a.row;
      const T* const b = static_cast<const T*>(args.b.data) + matrix * args.b.batch;
      T* const c = static_cast<T*>(args.c) + (matrix * args.m + first) * args.n;
      for_row_groups(std::min<int64_t>(kRows, args.m - first), [&](int64_t i, int rows) {
        for (int64_t j = 0; j < args.n; j += width) {
          const int64_t columns = std::min(width, args.n - j);
          add_outer_products(args.k, rows, a + i * args.a.row, args.a.row, args.a.col, b + j, ld,
                             columns, direct ? c + i * args.n : sums, width, false);
          if (!direct) store(sums, width, matrix, first + i, rows, j, columns);
        }
      });
    }
  });
}

}  // namespace braze::cpu
