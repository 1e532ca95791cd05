// Convolutions of few results: up to eight filters forward, or up to eight channels of an input's
// gradient. Pixels are the rows of mma.sync's product and the results its eight columns. A row is
// a pixel's channels, read by ldmatrix from a tile of the image in shared memory, which every tap
// reads at an offset.
#pragma once

#include "patch.cuh"
#include "products.cuh"
#include "cuda/common/graph.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::narrow {

constexpr int kResults = 8;
// Few pixels for each warp, since instructions' latencies are all that small batches wait for.
constexpr int kOutputWarps = 8, kOutputThreads = 32 * kOutputWarps;
constexpr int kRowTiles = 2;  // of 16 pixels, for each warp

// "source": x, or y's gradient; "results": the channels of y, or of x's gradient.
struct OutputArgs {
  const void *source, *weights, *bias;
  void* out;
  int results, channels, height, width, rows, columns, taps_h, taps_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int64_t x_n, x_h, x_w, y_n, y_c, y_h, y_w;  // strides of source and out
  int64_t w_k, w_c, w_r, w_s;                 // weights: by result, by channel, by tap

  int tile_rows, tile_columns, tiles;
  FastDiv tiles_of_image, tiles_across, by_tile_columns;
  // A tile's patch of the source, in chunks of channels; `pitch` bytes from a pixel to the next.
  int patch_rows, patch_columns, pitch, steps, chunks;  // steps: of the sum, in a chunk
  FastDiv by_units, by_patch_columns, by_taps, by_taps_w;
  bool pairs;  // results are stored in twos
  bool relu;   // of results, NaN stays NaN
};

constexpr int channel_step(int size) { return 32 / size; }  // of the sum, in one product

inline int output_shared_bytes(const OutputArgs& a) {
  const int weights = a.chunks * a.steps * a.taps_h * a.taps_w * 32 * sizeof(uint2);
  return weights + 2 * a.patch_rows * a.patch_columns * a.pitch;
}

template <typename T, bool kSplit>
class NarrowOutput {
  static constexpr int kPer = per_word(sizeof(T)), kStep = channel_step(sizeof(T));
  static constexpr int kUnit = 16 / sizeof(T);

  const OutputArgs& a_;
  uint2* const weights_;
  char* const patches_;
  const int lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32, g_ = lane_ / 4, t_ = lane_ % 4;
  const int pixels_ = a_.tile_rows * a_.tile_columns, taps_ = a_.taps_h * a_.taps_w;
  int base_[kRowTiles];  // bytes of a patch where this lane's row for ldmatrix begins
  float acc_[kRowTiles][4];

  __device__ __forceinline__ int first_pixel(int m) const {
    return (m * kOutputWarps + warp_) * 16;
  }

  __device__ __forceinline__ Place place_of_tile(int tile) const {
    int rest, right;
    const int image = a_.tiles_of_image.div(tile, rest);
    const int down = a_.tiles_across.div(rest, right);
    return {image, down * a_.tile_rows, right * a_.tile_columns};
  }

  // Asynchronously: the caller commits. Zeros outside of the image and beyond its channels.
  __device__ __forceinline__ void stage(int tile, int chunk, char* to) const {
    const Place place = place_of_tile(tile);
    const int h0 = place.p * a_.stride_h - a_.pad_h, w0 = place.q * a_.stride_w - a_.pad_w;
    const T* const image = static_cast<const T*>(a_.source) + place.image * a_.x_n;
    const int units = 2 * a_.steps, all = a_.patch_rows * a_.patch_columns * units;
#pragma unroll 4
    for (int i = threadIdx.x; i < all; i += kOutputThreads) {
      int unit, column;
      const int pixel = a_.by_units.div(i, unit);
      const int row = a_.by_patch_columns.div(pixel, column);
      const int h = h0 + row, w = w0 + column, c = (chunk * units + unit) * kUnit;
      const bool inside = h >= 0 && h < a_.height && w >= 0 && w < a_.width && c < a_.channels;
      const int64_t offset = inside ? h * a_.x_h + w * a_.x_w + c : 0;
      cp_async<16>(to + pixel * a_.pitch + unit * 16, image + offset, inside);
    }
  }

  // The weights as the products' lanes hold them.
  __device__ __forceinline__ void stage_weights() const {
    const T* const from = static_cast<const T*>(a_.weights);
    const int all = a_.chunks * a_.steps * taps_ * 32;
#pragma unroll 2
    for (int i = threadIdx.x; i < all; i += kOutputThreads) {
      int tap, s;
      const int step = a_.by_taps.div(i / 32, tap), r = a_.by_taps_w.div(tap, s);
      const int64_t of_tap = g_ * a_.w_k + r * a_.w_r + s * a_.w_s;
      const auto element = [&](int c) -> uint32_t {
        const bool there = g_ < a_.results && c < a_.channels;
        const T v = from[there ? of_tap + c * a_.w_c : 0];
        if constexpr (kPer == 2) return there ? *reinterpret_cast<const uint16_t*>(&v) : 0;
        return there ? product_word<T, kSplit>(__float_as_uint(v)) : 0;
      };
      uint32_t word[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = step * kStep + half * (kStep / 2) + t_ * kPer;
        word[half] = element(c);
        if constexpr (kPer == 2) word[half] |= element(c + 1) << 16;
      }
      weights_[i] = {word[0], word[1]};
    }
  }

  __device__ __forceinline__ void prepare() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int pixel = first_pixel(m) + lane_ % 16;
      int column;
      const int row = a_.by_tile_columns.div(pixel < pixels_ ? pixel : 0, column);
      const int at = row * a_.stride_h * a_.patch_columns + column * a_.stride_w;
      base_[m] = at * a_.pitch + lane_ / 16 * 16;
    }
  }

  __device__ __forceinline__ void multiply(int chunk, const char* patch) {
    const uint2* weights = weights_ + chunk * a_.steps * taps_ * 32 + lane_;
#pragma unroll 1
    for (int r = 0; r < a_.taps_h; ++r) {
#pragma unroll 1
      for (int s = 0; s < a_.taps_w; ++s, weights += 32) {
        const int tap = (r * a_.dilation_h * a_.patch_columns + s * a_.dilation_w) * a_.pitch;
#pragma unroll 2
        for (int step = 0; step < a_.steps; ++step) {
          const uint2 w = weights[step * taps_ * 32];
          Fragment<kSplit, 2> columns;
          columns.set(0, w.x), columns.set(1, w.y);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            if (first_pixel(m) >= pixels_) break;
            uint32_t v[4];
            ldmatrix_x4(v, patch + base_[m] + tap + step * 32);
            Fragment<kSplit, 4> rows;
#pragma unroll
            for (int i = 0; i < 4; ++i) rows.set(i, product_word<T, kSplit>(v[i]));
            narrow::multiply<T>(acc_[m], rows, columns);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store(int tile) const {
    const Place place = place_of_tile(tile);
    T* const image = static_cast<T*>(a_.out) + place.image * a_.y_n;
    const int first = 2 * t_;  // of a lane's two results
    if (first >= a_.results) return;
    float bias[2] = {};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (a_.bias && first + e < a_.results) {
        bias[e] = convert<float>(static_cast<const T*>(a_.bias)[first + e]);
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pixel = first_pixel(m) + half * 8 + g_;
        int q;
        const int p = place.p + a_.by_tile_columns.div(pixel, q);
        q += place.q;
        if (pixel >= pixels_ || p >= a_.rows || q >= a_.columns) continue;
        Vec<T, 2> v;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float value = acc_[m][half * 2 + e] + bias[e];
          v.v[e] = convert<T>(a_.relu && value < 0 ? 0.0f : value);
        }
        T* const to = image + p * a_.y_h + q * a_.y_w + first * a_.y_c;
        if (a_.pairs) {
          store_vec<2>(to, v);
        } else {
          to[0] = v.v[0];
          if (first + 1 < a_.results) to[a_.y_c] = v.v[1];
        }
      }
    }
  }

 public:
  __device__ __forceinline__ NarrowOutput(const OutputArgs& a, uint4* shared)
      : a_(a),
        weights_(reinterpret_cast<uint2*>(shared)),
        patches_(
            reinterpret_cast<char*>(weights_ + a.chunks * a.steps * a.taps_h * a.taps_w * 32)) {}

  __device__ __forceinline__ void run() {
    const int bytes = a_.patch_rows * a_.patch_columns * a_.pitch;
    int buffer = 0;
    stage(blockIdx.x, 0, patches_);
    cp_async_commit();
    stage_weights();
    prepare();
    for (int tile = blockIdx.x; tile < a_.tiles; tile += gridDim.x) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc_[m][i] = 0;
      }
      for (int chunk = 0; chunk < a_.chunks; ++chunk) {
        const bool last = chunk + 1 == a_.chunks;
        const int next = last ? tile + gridDim.x : tile;
        if (next < a_.tiles) stage(next, last ? 0 : chunk + 1, patches_ + (buffer ^ 1) * bytes);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        multiply(chunk, patches_ + buffer * bytes);
        __syncthreads();  // the buffer is filled anew
        buffer ^= 1;
      }
      store(tile);
    }
  }
};

template <typename T, bool kSplit>
__global__ void __launch_bounds__(kOutputThreads, 3)
    narrow_output_kernel(const __grid_constant__ OutputArgs a) {
  extern __shared__ uint4 shared[];
  wait_for_earlier_kernels();
  NarrowOutput<T, kSplit>(a, shared).run();
}

}  // namespace braze::cuda::narrow
