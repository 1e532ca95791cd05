// The forward pass: pixels times filters with mma.sync. A lane's part of the left operand are words
// of the patch, at an offset for each term that all pixels share.
#pragma once

#include "moments.cuh"
#include "patch.cuh"
#include "products.cuh"
#include "cuda/common/graph.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::narrow {

using Function = void (*)(Args);

// Filters in eights, of 16 to 64 a block, of fp32 (split) to 32. pixel_rows: pixels are the rows of
// the product, for results that are channels last; else its columns.
Function fprop_bf16(int groups, bool pixel_rows);
Function fprop_fp16(int groups, bool pixel_rows);
Function fprop_tf32(int groups, bool pixel_rows);
Function fprop_fp32(int groups, bool pixel_rows);

// Filters that a thread has side by side, as many as it stores at a time.
__host__ __device__ constexpr int run_of(int size, int groups) {
  return size == 2 && groups % 4 == 0 ? 8 : 4;
}

constexpr int term_step(int size) { return 32 / size; }  // of the sum, in one product

// Shared memory: the filters as the products' lanes hold them, the terms' offsets and masks, scales
// and offsets of the results, moments, two buffers of patches.
inline int fprop_shared_bytes(const Args& a, int groups) {
  const int moments = kWarps * (3 * groups * 8 + 1);  // words
  return a.steps * (groups / 2 * 512 + 64) + groups * 64 + moments * 4 +
         2 * a.copies * a.patch_words * 4;
}

template <typename T, bool kSplit, int kGroups, bool kPixelRows>
class Fprop {
  static constexpr int kPer = per_word(sizeof(T)), kStep = term_step(sizeof(T));
  static constexpr int kPairs = kGroups / 2, kRun = run_of(sizeof(T), kGroups);
  static constexpr int kPixelGroups = kWarpPixels / 8;
  static_assert(kGroups % 2 == 0);

  const Args& a_;
  uint4 *filters_, *terms_;
  float *scale_, *offset_;
  BlockMoments<kGroups * 8> moments_;
  uint32_t* patches_;
  const int lane_ = threadIdx.x % 32, g_ = lane_ / 4, t_ = lane_ % 4;
  const int warp_pixel_ = threadIdx.x / 32 * kWarpPixels, k0_ = blockIdx.y * kGroups * 8;
  int base_[kPixelGroups];  // bytes of the patches where this lane's pixels begin
  float acc_[4 * kGroups][4];

  // The filter, of the block's, of group j and row or column n of a product. As columns they are
  // dealt out such that a thread gets kRun side by side.
  static __device__ __forceinline__ int filter_of(int j, int n) {
    if (!kPixelRows) return j * 8 + n;
    return j / (kRun / 2) * (4 * kRun) + n / 2 * kRun + j % (kRun / 2) * 2 + n % 2;
  }
  // The pixel, of the tile's, of group i and row or column n: as columns likewise, eight.
  __device__ __forceinline__ int pixel_of(int i, int n) const {
    if (kPixelRows) return warp_pixel_ + i * 8 + n;
    return warp_pixel_ + i / 4 * 32 + n / 2 * 8 + i % 4 * 2 + n % 2;
  }

  // A term's filter row and its element there; whether there is one.
  __device__ __forceinline__ bool find(int term, int& r, int& e) const {
    r = a_.by_row_terms.div(term, e);
    e -= a_.lead;
    return r < a_.taps_h && e >= 0 && e < a_.taps_w * a_.channels;
  }

  // Where a term's weight lies in a filter, whose taps may run backwards; kNone if there is none.
  static constexpr int64_t kNone = INT64_MIN;
  __device__ __forceinline__ int64_t weight_offset(int term) const {
    int r, e, c;
    const bool there = find(term, r, e);
    const int s = a_.by_channels.div(there ? e : 0, c);
    return there ? r * a_.w_r + s * a_.w_s + c * a_.w_c : kNone;
  }

  // Loaded wherever it is not there too: loads behind branches would wait for each other.
  __device__ __forceinline__ uint32_t weight(int filter, int64_t offset) const {
    const bool there = offset != kNone && filter < a_.filters;
    const T v = static_cast<const T*>(a_.other)[there ? filter * a_.w_k + offset : 0];
    if constexpr (kPer == 2) return there ? *reinterpret_cast<const uint16_t*>(&v) : 0;
    return there ? product_word<T, kSplit>(__float_as_uint(v)) : 0;
  }

  // The first of a lane's terms of a step, in its lower or upper half.
  static __device__ __forceinline__ int term_of(int step, int half, int t) {
    return step * kStep + half * (kStep / 2) + t * kPer;
  }

  __device__ __forceinline__ uint32_t filter_word(int filter,
                                                  const int64_t (&offsets)[kPer]) const {
    uint32_t word = weight(filter, offsets[0]);
    if constexpr (kPer == 2) word |= weight(filter, offsets[1]) << 16;
    return word;
  }

  __device__ __forceinline__ void prepare() {
    for (int step = threadIdx.x / 32; step < a_.steps; step += kWarps) {
      int64_t low[kPer], high[kPer];
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        low[e] = weight_offset(term_of(step, 0, t_) + e);
        high[e] = weight_offset(term_of(step, 1, t_) + e);
      }
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int first = k0_ + filter_of(2 * j, g_), second = k0_ + filter_of(2 * j + 1, g_);
        filters_[(step * kPairs + j) * 32 + lane_] = {
            filter_word(first, low), filter_word(first, high), filter_word(second, low),
            filter_word(second, high)};
      }
    }
    for (int i = threadIdx.x; i < a_.steps * 4; i += kThreads) {
      uint32_t offset[2], mask[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int term = term_of(i / 4, half, i % 4);
        int r, e;
        const bool first = find(term, r, e);
        offset[half] = r < a_.taps_h ? (r * a_.pitch + e + a_.lead) * sizeof(T) : 0;
        mask[half] = first ? (kPer == 2 ? 0xffffu : ~0u) : 0;
        if (kPer == 2 && find(term + 1, r, e)) mask[half] |= 0xffff0000u;
      }
      terms_[i] = {offset[0], offset[1], mask[0], mask[1]};
    }
    for (int i = threadIdx.x; i < kGroups * 8; i += kThreads) {
      const int k = k0_ + i;
      const bool inside = k < a_.filters, has_bias = inside && a_.bias;
      float2 of{1, has_bias ? convert<float>(static_cast<const T*>(a_.bias)[k]) : 0};
      if (inside && a_.tail.mean) of = a_.tail.coefficients(k);
      scale_[i] = of.x, offset_[i] = of.y;
    }
#pragma unroll
    for (int i = 0; i < kPixelGroups; ++i) {
      int column;
      const int row = a_.by_tile_columns.div(pixel_of(i, g_), column);
      const int from = row * a_.stride_h * a_.pitch + column * a_.stride_w * a_.channels;
      base_[i] = (from / kPer + (kPer == 2 && from % 2 ? a_.patch_words : 0)) * 4;
      if (row >= a_.tile_rows) base_[i] = 0;  // not a pixel of the tile
    }
  }

  // The copy of the patch that begins an element later.
  __device__ __forceinline__ void copy_shifted(uint32_t* patch) const {
    for (int i = threadIdx.x; i < a_.patch_words - 1; i += kThreads) {
      patch[a_.patch_words + i] = __funnelshift_r(patch[i], patch[i + 1], 16);
    }
  }

  // A word of a pixel's patch, `offset` bytes from where it begins.
  __device__ __forceinline__ uint32_t patch_word(int pixel, uint32_t offset) const {
    const char* const bytes = reinterpret_cast<const char*>(patches_);
    return *reinterpret_cast<const uint32_t*>(bytes + base_[pixel] + offset);
  }

  __device__ __forceinline__ void multiply() {
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc_[i][j] = 0;
    }
#pragma unroll 1
    for (int step = 0; step < a_.steps; ++step) {
      const uint4 term = terms_[step * 4 + t_];
      Fragment<kSplit, 2> pixels[kPixelGroups];
#pragma unroll
      for (int i = 0; i < kPixelGroups; ++i) {
        pixels[i].set(0, product_word<T, kSplit>(patch_word(i, term.x) & term.z));
        pixels[i].set(1, product_word<T, kSplit>(patch_word(i, term.y) & term.w));
      }
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const uint4 f = filters_[(step * kPairs + j) * 32 + lane_];
        Fragment<kSplit, 2> first, second;
        first.set(0, f.x), first.set(1, f.y), second.set(0, f.z), second.set(1, f.w);
        if constexpr (kPixelRows) {
#pragma unroll
          for (int m = 0; m < kPixelGroups / 2; ++m) {
            const auto rows = rows_of(pixels[2 * m], pixels[2 * m + 1]);
            narrow::multiply<T>(acc_[m * kGroups + 2 * j], rows, first);
            narrow::multiply<T>(acc_[m * kGroups + 2 * j + 1], rows, second);
          }
        } else {
          const auto rows = rows_of(first, second);
#pragma unroll
          for (int n = 0; n < kPixelGroups; ++n) {
            narrow::multiply<T>(acc_[j * kPixelGroups + n], rows, pixels[n]);
          }
        }
      }
    }
  }

  // Whether a pixel of the tile is one of the image's, and which.
  __device__ __forceinline__ bool locate(const Place& place, int pixel, int& p, int& q) const {
    const int row = a_.by_tile_columns.div(pixel, q);
    p = place.p + row;
    q += place.q;
    return row < a_.tile_rows && p < a_.rows && q < a_.columns;
  }

  // What a thread has of the results: filters and pixels, and the filter and the pixel, of the
  // block's and of the tile's, that each of them is.
  static constexpr int kOwnFilters = kPixelRows ? 2 * kGroups : kGroups;
  static constexpr int kOwnPixels = kPixelRows ? kPixelGroups : 2 * kPixelGroups;

  __device__ __forceinline__ int own_filter(int i) const {
    return kPixelRows ? i / kRun * 4 * kRun + t_ * kRun + i % kRun : i * 8 + g_;
  }
  __device__ __forceinline__ int own_pixel(int i) const {
    return kPixelRows ? pixel_of(i, g_) : pixel_of(i / 8 * 4, t_ * 2) + i % 8;
  }
  __device__ __forceinline__ T own_result(int filter, int pixel) const {
    const int tile =
        kPixelRows ? pixel / 2 * kGroups + filter / 2 : filter / 2 * kPixelGroups + pixel / 2;
    const int row = (kPixelRows ? pixel : filter) % 2, column = (kPixelRows ? filter : pixel) % 2;
    const int own = own_filter(filter);
    const float v = fmaf(acc_[tile][row * 2 + column], scale_[own], offset_[own]);
    return convert<T>(bounded(v, a_.tail.low, a_.tail.high));
  }

  __device__ __forceinline__ void store_rows(const Place& place) const {
    T* const image = static_cast<T*>(a_.out) + place.image * a_.y_n;
#pragma unroll
    for (int i = 0; i < kOwnPixels; ++i) {
      int p, q;
      if (!locate(place, own_pixel(i), p, q)) continue;
      T* const to = image + p * a_.y_h + q * a_.y_w;
#pragma unroll
      for (int first = 0; first < kOwnFilters; first += kRun) {
        Vec<T, kRun> v;
#pragma unroll
        for (int e = 0; e < kRun; ++e) v.v[e] = own_result(first + e, i);
        const int k = k0_ + own_filter(first);
        if (a_.vectors && k + kRun <= a_.filters) {
          store_vec<kRun>(to + k, v);
        } else {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            if (k + e < a_.filters) to[(k + e) * a_.y_c] = v.v[e];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store_columns(const Place& place) const {
    T* const image = static_cast<T*>(a_.out) + place.image * a_.y_n;
#pragma unroll
    for (int first = 0; first < kOwnPixels; first += 8) {
      const int pixel = own_pixel(first);
      int p, q;
      const bool inside = locate(place, pixel, p, q);
      const bool vector = a_.vectors && inside && q + 8 <= a_.columns;
#pragma unroll
      for (int i = 0; i < kOwnFilters; ++i) {
        const int k = k0_ + own_filter(i);
        if (k >= a_.filters) continue;
        T* const to = image + k * a_.y_c;
        Vec<T, 8> v;
#pragma unroll
        for (int e = 0; e < 8; ++e) v.v[e] = own_result(i, first + e);
        if (vector) {
          store_vec<8>(to + p * a_.y_h + q, v);
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            int at_p, at_q;
            if (locate(place, pixel + e, at_p, at_q)) to[at_p * a_.y_h + at_q * a_.y_w] = v.v[e];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void add_moments(const Place& place) {
    uint32_t inside = 0;
#pragma unroll
    for (int i = 0; i < kOwnPixels; ++i) {
      int p, q;
      inside |= uint32_t{locate(place, own_pixel(i), p, q)} << i;
    }
    const auto filter = [&](int i) { return own_filter(i); };
    const auto value = [&](int i, int j) { return convert<float>(own_result(i, j)); };
    if constexpr (kPixelRows) {
      moments_.template add<kOwnFilters, kOwnPixels, 4, 32>(inside, filter, value);
    } else {
      moments_.template add<kOwnFilters, kOwnPixels, 1, 4>(inside, filter, value);
    }
  }

 public:
  __device__ __forceinline__ Fprop(const Args& a, uint4* shared)
      : a_(a),
        filters_(shared),
        terms_(filters_ + a.steps * kPairs * 32),
        scale_(reinterpret_cast<float*>(terms_ + a.steps * 4)),
        offset_(scale_ + kGroups * 8),
        moments_(offset_ + kGroups * 8),
        patches_(reinterpret_cast<uint32_t*>(offset_ + kGroups * 8 + decltype(moments_)::kWords)) {}

  __device__ __forceinline__ void run() {
    const int buffer_words = a_.copies * a_.patch_words;
    int tile = blockIdx.x, buffer = 0;  // 0 or 1
    stage_patch<T>(a_, place_of(a_, tile), patches_);
    cp_async_commit();
    prepare();
    for (; tile < a_.tiles; tile += gridDim.x) {
      const int next = tile + gridDim.x;
      uint32_t* const patch = patches_ + buffer * buffer_words;
      if (next < a_.tiles) {
        stage_patch<T>(a_, place_of(a_, next), patches_ + (buffer ^ 1) * buffer_words);
      }
      cp_async_commit();
      cp_async_wait<1>();
      __syncthreads();
      if (a_.copies > 1) {
        copy_shifted(patch);
        __syncthreads();
      }
      multiply();
      const Place place = place_of(a_, tile);
      if constexpr (kPixelRows) {
        store_rows(place);
      } else {
        store_columns(place);
      }
      if (a_.moments) add_moments(place);
      __syncthreads();  // the buffer is filled anew
#pragma unroll
      for (int i = 0; i < kPixelGroups; ++i) base_[i] += (buffer ? -4 : 4) * buffer_words;
      buffer ^= 1;
    }
    if (a_.moments) {
      moments_.store(a_.moments + int64_t{k0_} * gridDim.x, a_.filters - k0_);
    }
  }
};

template <typename T, bool kSplit, int kGroups, bool kPixelRows>
__global__ void __launch_bounds__(kThreads, kGroups > 4 || kSplit ? 2 : 3)
    narrow_input_fprop_kernel(const __grid_constant__ Args a) {
  extern __shared__ uint4 shared[];
  wait_for_earlier_kernels();
  Fprop<T, kSplit, kGroups, kPixelRows>(a, shared).run();
}

template <typename T, bool kSplit, int kGroups>
Function fprop_function(bool pixel_rows) {
  return pixel_rows ? narrow_input_fprop_kernel<T, kSplit, kGroups, true>
                    : narrow_input_fprop_kernel<T, kSplit, kGroups, false>;
}

template <typename T, bool kSplit = false>
Function fprop_function(int groups, bool pixel_rows) {
  if constexpr (!kSplit) {  // else there are not registers enough
    if (groups == 6) return fprop_function<T, kSplit, 6>(pixel_rows);
    if (groups == 8) return fprop_function<T, kSplit, 8>(pixel_rows);
  }
  return groups == 2 ? fprop_function<T, kSplit, 2>(pixel_rows)
                     : fprop_function<T, kSplit, 4>(pixel_rows);
}

}  // namespace braze::cuda::narrow
