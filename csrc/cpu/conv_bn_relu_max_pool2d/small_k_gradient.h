// The sums over all windows that the gradients of conv_bn_relu_max_pool2d.h follow from.
#pragma once

#include <vector>

#include "cpu/common/parallel.h"
#include "cpu/conv_bn_relu_max_pool2d/small_k_image.h"

namespace braze::cpu {

// Taps whose sums are kept in registers together: a 3x3 filter's.
constexpr int kTapGroup = 9;

// sums[t] = sum over a row of `windows` windows and their four positions of grads [window][4] * the
// pixel under tap t. `taps` is padded to whole groups.
template <typename A>
void sum_row(const vec_t<A>* grads, int64_t windows, const A* corner, int64_t pitch,
             const std::vector<int64_t>& taps, vec_t<A>* sums) {
  using V = vec_t<A>;
  const int64_t steps[4] = {0, 1, pitch, pitch + 1};
  for (size_t first = 0; first < taps.size(); first += kTapGroup) {
    const int64_t* offsets = &taps[first];
    V sum[kTapGroup] = {};
    for (int64_t i = 0; i < windows; ++i) {
      for (int position = 0; position < 4; ++position) {
        const V grad = grads[4 * i + position];
        const A* at = corner + 2 * i + steps[position];
#pragma GCC unroll 9
        for (int t = 0; t < kTapGroup; ++t) sum[t] += grad * at[offsets[t]];
      }
    }
#pragma GCC unroll 9
    for (int t = 0; t < kTapGroup; ++t) sums[first + t] = sum[t];
  }
}

// Q [k][taps] and S1 [k] of conv_bn_relu_max_pool2d.h: per pooled row in T's accumulation type, in
// total in fp64.
template <typename T>
std::vector<double> gradient_sums(const SmallKShape& a, const T* x, const T* dy,
                                  const uint32_t* codes) {
  using A = acc_t<T>;
  using V = vec_t<A>;
  using Pooled = PooledImage<A>;
  constexpr int64_t kL = kLanes<A>;
  const int64_t taps = a.c * a.r * a.s, size = a.k * (taps + 1);
  OrderedSum result(size);
  parallel_for(0, a.n, 2, [&](int64_t first, int64_t last) {
    PaddedImage<A> image(a);
    Pooled pooled(a);
    std::vector<int64_t> offsets = image.taps;
    offsets.resize(ceil_div(taps, kTapGroup) * kTapGroup);
    // The row's gradient by window position: zero in the three positions that lost.
    std::vector<V> grads(pooled.q * 4), sums(offsets.size() + 1);
    std::vector<double> total(size), lane_sums(pooled.vectors * (taps + 1) * kL);
    for (int64_t n = first; n < last; ++n) {
      image.load(a, x, n);
      pooled.unpack_codes(codes + n * pooled.pixels * pooled.words);
      const T* from = dy + n * a.k * pooled.pixels;
      const A* values = pooled.values.data();
      if constexpr (std::is_same_v<T, A>) {
        if (pooled.template matches<T>(a)) values = from;
      }
      if (!pooled.template matches<T>(a)) {
        copy_matrix(pooled.values.data(), pooled.width, from, a.channels_last ? a.k : 1,
                    a.channels_last ? 1 : pooled.pixels, pooled.pixels, a.k);
      }
      for (int64_t row = 0; row < pooled.pixels; row += pooled.q) {
        const A* corner = image.values.data() + 2 * (row / pooled.q) * image.pitch;
        for (int64_t v = 0; v < pooled.vectors; ++v) {
          V all{};
          for (int64_t i = 0; i < pooled.q; ++i) {
            const V grad = load<V>(values + (row + i) * pooled.width + v * kL);
            const auto code =
                __builtin_convertvector(load<typename Pooled::Codes>(
                                            &pooled.codes[(row + i) * pooled.codes_width + v * kL]),
                                        typename Pooled::Positions);
            for (int position = 0; position < 4; ++position) {
              const V passed = code == position ? grad : V{};
              grads[4 * i + position] = passed;
              all += passed;
            }
          }
          sum_row<A>(grads.data(), pooled.q, corner, image.pitch, offsets, sums.data());
          sums[taps] = all;
          double* to = &lane_sums[v * (taps + 1) * kL];
          for (int64_t t = 0; t <= taps; ++t) {
            for (int64_t l = 0; l < kL; ++l) to[t * kL + l] += static_cast<double>(sums[t][l]);
          }
        }
      }
    }
    for (int64_t k = 0; k < a.k; ++k) {
      for (int64_t t = 0; t <= taps; ++t) {
        total[k * (taps + 1) + t] = lane_sums[(k / kL * (taps + 1) + t) * kL + k % kL];
      }
    }
    result.add(first, std::move(total));
  });
  return result.total();
}

}  // namespace braze::cpu
