// The weight gradient: filters times taps, summed over pixels, with mma.sync. Patches are
// rearranged in shared memory such that neighbouring pixels meet neighbouring elements.
#pragma once

#include "patch.cuh"
#include "products.cuh"
#include "cuda/common/graph.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/share_sums.cuh"

namespace braze::cuda::narrow {

using Function = void (*)(Args);

// filters: of a block, 32 or, unless fp32 is split, 64; taps: tiles of 8 of each warp, 4, 5 or 8.
// filters_last: dy is channels last.
Function wgrad_bf16(int filters, int taps, bool filters_last);
Function wgrad_fp16(int filters, int taps, bool filters_last);
Function wgrad_tf32(int filters, int taps, bool filters_last);
Function wgrad_fp32(int filters, int taps, bool filters_last);

constexpr int pixel_step(int size) { return 32 / size; }  // of the sum, in one product

// Elements from a line of dy's tile in shared memory to the next, such that eight lines, or four of
// words, begin in banks of their own. A line: a pixel's filters, or a filter's pixels.
__host__ __device__ constexpr int gradient_pitch(int size, bool filters_last, int filters,
                                                 int pixels) {
  return filters_last ? filters + 8 : pixels + 16 / size;
}
__host__ __device__ constexpr int gradient_elements(int size, bool filters_last, int filters,
                                                    int pixels) {
  return gradient_pitch(size, filters_last, filters, pixels) * (filters_last ? pixels : filters);
}

// Shared memory: two buffers of dy and of patches, the planes; later the sums that warps share.
inline int wgrad_shared_bytes(const Args& a, int filters, int taps) {
  const int words = 2 * (a.gradient_words + a.patch_words) + a.copies * a.plane_words;
  const int sums = a.warps_across * filters / 16 * taps * 4 * 32;
  return 4 * (words > sums ? words : sums);
}

template <typename T, bool kSplit, int kFilters, int kTaps, bool kFiltersLast>
class Wgrad {
  static constexpr int kPer = per_word(sizeof(T)), kStep = pixel_step(sizeof(T));
  static constexpr int kRows = kFilters / 16;
  static_assert(kFilters % 16 == 0 &&
                gradient_pitch(sizeof(T), true, kFilters, 0) * sizeof(T) % 16 == 0);

  const Args& a_;
  uint32_t *gradients_, *patches_, *planes_;
  const int lane_ = threadIdx.x % 32, g_ = lane_ / 4, t_ = lane_ % 4;
  const int across_ = threadIdx.x / 32 % a_.warps_across;  // among the warps that share out taps
  const int part_ = threadIdx.x / 32 / a_.warps_across;    // ... the pixels
  const int k0_ = blockIdx.y * kFilters;
  const int first_tap_ = (blockIdx.z * a_.warps_across + across_) * kTaps * 8;
  const int pitch_ =
      gradient_pitch(sizeof(T), kFiltersLast, kFilters, a_.tile_rows* a_.tile_columns);
  int base_[kTaps];  // words of the planes where this lane's taps begin
  float acc_[kRows * kTaps * 4];

  struct Tap {
    int r, s, c;
  };
  __device__ __forceinline__ Tap tap_of(int tap) const {
    Tap result;
    result.r = a_.by_taps_w.div(a_.by_channels.div(tap, result.c), result.s);
    return result;
  }
  __device__ __forceinline__ int taps() const { return a_.taps_h * a_.taps_w * a_.channels; }

  __device__ __forceinline__ void prepare() {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      const int tap = first_tap_ + i * 8 + g_;
      const Tap at = tap_of(tap < taps() ? tap : 0);
      int phase;
      const int shift = a_.by_stride.div(at.s, phase);
      const int plane = (at.r * a_.stride_w + phase) * a_.channels + at.c;
      base_[i] = plane * (a_.plane_pitch / kPer) + shift / kPer + t_;
      if (kPer == 2 && shift % 2) base_[i] += a_.plane_words;
    }
#pragma unroll
    for (int i = 0; i < kRows * kTaps * 4; ++i) acc_[i] = 0;
  }

  // A tile of dy, kWidth elements at a time; zeros beyond its edges and the filters.
  template <int kWidth>
  __device__ __forceinline__ void stage_gradients(const Place& place, T* to) const {
    const int pixels = a_.tile_rows * a_.tile_columns;
    const T* const image = static_cast<const T*>(a_.other) + place.image * a_.y_n;
    for (int i = threadIdx.x; i < pixels * kFilters / kWidth; i += kThreads) {
      int pixel, filter;
      if constexpr (kFiltersLast) {
        pixel = i / (kFilters / kWidth), filter = i % (kFilters / kWidth) * kWidth;
      } else {
        const int in_line = pixels / kWidth;
        filter = i / in_line, pixel = i % in_line * kWidth;
      }
      int q;
      const int p = place.p + a_.by_tile_columns.div(pixel, q), k = k0_ + filter;
      q += place.q;
      const bool inside = p < a_.rows && q < a_.columns && k < a_.filters;
      const T* const from = image + (inside ? k * a_.y_c + p * a_.y_h + q * a_.y_w : 0);
      T* const at = to + (kFiltersLast ? pixel * pitch_ + filter : filter * pitch_ + pixel);
      if constexpr (kWidth * sizeof(T) >= 4) {
        cp_async<kWidth * sizeof(T)>(at, from, inside);
      } else {
        *reinterpret_cast<uint16_t*>(at) =
            load_inside<1>(reinterpret_cast<const uint16_t*>(from), inside).v[0];
      }
    }
  }

  __device__ __forceinline__ void stage(int tile, int buffer) const {
    const Place place = place_of(a_, tile);
    T* const to = reinterpret_cast<T*>(gradients_ + buffer * a_.gradient_words);
    if (a_.gradient_width == 16 / sizeof(T)) {
      stage_gradients<16 / sizeof(T)>(place, to);
    } else if (a_.gradient_width == kPer) {
      stage_gradients<kPer>(place, to);
    } else {
      stage_gradients<1>(place, to);
    }
    stage_patch<T>(a_, place, patches_ + buffer * a_.patch_words);
  }

  // The planes from a patch, and 16 bits' copy that begins an element later. A thread makes a few
  // words of one plane, which share elements; neighbouring lanes read neighbouring ones.
  __device__ __forceinline__ void arrange(const uint32_t* patch) const {
    using Bits = typename RawAccess<sizeof(T)>::type;
    const Bits* const from = reinterpret_cast<const Bits*>(patch) + a_.lead;
    const int step = a_.stride_w * a_.channels, parts = a_.by_parts.divisor();
    const int columns = (a_.tile_columns - 1) * a_.stride_w + a_.taps_w;
    for (int i = threadIdx.x; i < a_.patch_rows * step * parts; i += kThreads) {
      int plane, part;  // the plane is an element of a step
      const int row = a_.by_parts.div(a_.by_step.div(i, plane), part);
      const Bits* next = from + row * a_.pitch + part * (kPlanePart * kPer * step) + plane;
      const Bits* const end = from + row * a_.pitch + columns * a_.channels;
      const auto element = [&]() -> uint32_t {
        const uint32_t value = next < end ? *next : 0;
        next += step;
        return value;
      };
      uint32_t* const to =
          planes_ + (row * step + plane) * (a_.plane_pitch / kPer) + part * kPlanePart;
      uint32_t first = element();
#pragma unroll
      for (int at = 0; at < kPlanePart; ++at) {
        if (part * kPlanePart + at >= a_.plane_used) break;
        if constexpr (kPer == 1) {
          to[at] = product_word<T, kSplit>(first);
          first = element();
        } else {
          const uint32_t middle = element();
          to[at] = first | middle << 16;
          first = element();
          if (a_.copies > 1) to[a_.plane_words + at] = middle | first << 16;
        }
      }
    }
  }

  // Filters 16 * m and on at the pixels of a step, the first of which is the tile's `pixel`.
  __device__ __forceinline__ Fragment<kSplit, 4> load_gradients(const T* tile, int m,
                                                                int pixel) const {
    uint32_t v[4];
    if constexpr (kPer == 2 && kFiltersLast) {
      const int row = pixel + lane_ / 16 * 8 + lane_ % 8;
      ldmatrix_x4_trans(v, tile + row * pitch_ + m * 16 + lane_ / 8 % 2 * 8);
    } else {
      // Words from a filter to the next, and from a word of pixels to the next.
      const int k = kFiltersLast ? 1 : pitch_ / kPer, q = kFiltersLast ? pitch_ : 1;
      const uint32_t* const from =
          reinterpret_cast<const uint32_t*>(tile) + (m * 16 + g_) * k + (pixel / kPer + t_) * q;
      v[0] = from[0], v[1] = from[8 * k], v[2] = from[4 * q], v[3] = from[8 * k + 4 * q];
    }
    Fragment<kSplit, 4> rows;
#pragma unroll
    for (int i = 0; i < 4; ++i) rows.set(i, product_word<T, kSplit>(v[i]));
    return rows;
  }

  __device__ __forceinline__ void multiply(const Place& place, const T* gradients) {
    const int steps_across = a_.tile_columns / kStep, parts = kWarps / a_.warps_across;
    const int row_words = a_.stride_h * a_.channels * a_.stride_w * a_.plane_pitch / kPer;
#pragma unroll 1
    for (int step = part_; step < a_.tile_rows * steps_across; step += parts) {
      int across;
      const int row = a_.by_steps.div(step, across);
      // Pixels that are there: others meet what may be infinite.
      const int left = a_.columns - place.q - across * kStep - t_ * kPer;
      if (place.p + row >= a_.rows || left + t_ * kPer <= 0) continue;
      uint32_t mask[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int rest = left - half * (kStep / 2);
        mask[half] = kPer == 1 ? (rest > 0 ? ~0u : 0)
                               : (rest > 0 ? 0xffffu : 0) | (rest > 1 ? 0xffff0000u : 0);
      }
      Fragment<kSplit, 4> rows[kRows];
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        rows[m] = load_gradients(gradients, m, row * a_.tile_columns + across * kStep);
      }
      const uint32_t* const from = planes_ + row * row_words + across * (kStep / kPer);
#pragma unroll
      for (int n = 0; n < kTaps; ++n) {
        Fragment<kSplit, 2> columns;
        columns.set(0, from[base_[n]] & mask[0]), columns.set(1, from[base_[n] + 4] & mask[1]);
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          narrow::multiply<T>(*reinterpret_cast<float(*)[4]>(&acc_[(m * kTaps + n) * 4]), rows[m],
                              columns);
        }
      }
    }
  }

  // This block's part of the sums, as the filters' gradient lies in memory.
  __device__ __forceinline__ void store() const {
    float* const to = static_cast<float*>(a_.out) + blockIdx.x * (int64_t{a_.filters} * taps());
#pragma unroll
    for (int n = 0; n < kTaps; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int tap = first_tap_ + n * 8 + t_ * 2 + e;
        if (tap >= taps()) continue;
        const Tap at = tap_of(tap);
        const int64_t offset = at.r * a_.w_r + at.s * a_.w_s + at.c * a_.w_c;
#pragma unroll
        for (int row = 0; row < kRows * 2; ++row) {
          const int k = k0_ + row * 8 + g_;
          if (k < a_.filters) {
            to[k * a_.w_k + offset] = acc_[(row / 2 * kTaps + n) * 4 + row % 2 * 2 + e];
          }
        }
      }
    }
  }

 public:
  __device__ __forceinline__ Wgrad(const Args& a, uint4* shared)
      : a_(a),
        gradients_(reinterpret_cast<uint32_t*>(shared)),
        patches_(gradients_ + 2 * a.gradient_words),
        planes_(patches_ + 2 * a.patch_words) {}

  __device__ __forceinline__ void run() {
    int tile = blockIdx.x, buffer = 0;
    stage(tile, 0);
    cp_async_commit();
    prepare();
    for (; tile < a_.tiles; tile += gridDim.x) {
      const int next = tile + gridDim.x;
      if (next < a_.tiles) stage(next, buffer ^ 1);
      cp_async_commit();
      cp_async_wait<1>();
      __syncthreads();
      arrange(patches_ + buffer * a_.patch_words);
      __syncthreads();
      multiply(place_of(a_, tile),
               reinterpret_cast<const T*>(gradients_ + buffer * a_.gradient_words));
      __syncthreads();  // the buffer is filled anew
      buffer ^= 1;
    }
    float* const slot = reinterpret_cast<float*>(gradients_) + across_ * (kRows * kTaps * 4 * 32);
    share_sums(acc_, part_, kWarps / a_.warps_across, slot);
    if (part_ == 0) store();
  }
};

template <typename T, bool kSplit, int kFilters, int kTaps, bool kFiltersLast>
__global__ void __launch_bounds__(kThreads, kFilters* kTaps > 256 || kSplit ? 2 : 3)
    narrow_input_wgrad_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 shared[];
  wait_for_earlier_kernels();
  Wgrad<T, kSplit, kFilters, kTaps, kFiltersLast>(a, shared).run();
}

template <typename T, bool kSplit, int kFilters, int kTaps>
Function wgrad_function(bool filters_last) {
  return filters_last ? narrow_input_wgrad_kernel<T, kSplit, kFilters, kTaps, true>
                      : narrow_input_wgrad_kernel<T, kSplit, kFilters, kTaps, false>;
}

template <typename T, bool kSplit, int kFilters>
Function wgrad_function(int taps, bool filters_last) {
  switch (taps) {
    case 4: return wgrad_function<T, kSplit, kFilters, 4>(filters_last);
    case 5: return wgrad_function<T, kSplit, kFilters, 5>(filters_last);
    default: return wgrad_function<T, kSplit, kFilters, 8>(filters_last);
  }
}

template <typename T, bool kSplit = false>
Function wgrad_function(int filters, int taps, bool filters_last) {
  if constexpr (!kSplit) {  // else there are not registers enough
    if (filters == 64) return wgrad_function<T, kSplit, 64>(taps, filters_last);
  }
  return wgrad_function<T, kSplit, 32>(taps, filters_last);
}

}  // namespace braze::cuda::narrow
