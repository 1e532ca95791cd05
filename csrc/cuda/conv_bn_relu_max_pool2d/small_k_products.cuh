// The convolutions of the forward pass: 16 windows (two to a lane) x 32 filters (8 to a lane).
#pragma once

#include "cuda/common/mma.cuh"
#include "small_k_filters.cuh"

namespace braze::cuda::small_k {

// Convolutions of 16 outputs' windows by tensor cores. Filters are zero where a position does not
// see the window: the window is loaded once for four positions. Tile i of 4 has filters 2i and
// 2i + 1 of each lane's 8.
template <typename Tp, typename T>
class TensorProducts {
 public:
  using Staged = T;
  static constexpr int kBlocks = 2;                      // of a multiprocessor
  static constexpr int kFragments = 4 * Tp::kSteps * 4;  // position, step, tile
  using Shared = uint2[kFragments][32];

  static __device__ __forceinline__ T stage(T value) { return value; }

  // Called by all threads; a barrier has to follow before the constructor.
  static __device__ __forceinline__ void prepare(const Filters<Tp, float>& filters,
                                                 Shared& fragments) {
    for (int i = threadIdx.x; i < kFragments * 32; i += blockDim.x) {
      const int lane = i % 32, tile = i / 32 % 4, step = i / 128 % Tp::kSteps;
      const int j = i / (128 * Tp::kSteps);
      const int filter = 8 * (lane / 8) + 2 * tile + lane / 4 % 2;
      Vec<T, 2> pair[2];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int tap = Tp::tap(16 * step + 2 * (lane % 4) + e / 2 * 8 + e % 2, j);
        pair[e / 2].v[e % 2] = convert<T>(tap < 0 ? 0.0f : filters.weights[filter][tap]);
      }
      fragments[i / 32][lane] = {reinterpret_cast<const uint32_t&>(pair[0]),
                                 reinterpret_cast<const uint32_t&>(pair[1])};
    }
  }

  __device__ __forceinline__ TensorProducts(const Tiling& tiling, const Filters<Tp, float>&,
                                            const Shared& fragments)
      : fragments_(fragments) {
#pragma unroll
    for (int i = 0; i < 2 * Tp::kSteps; ++i) {
      const int e = 8 * i + threadIdx.x % 4 * 2;
      place_[i] = e < Tp::kWin ? staged_offset<Tp>(tiling, e) : -1;
    }
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kFragments; ++i) held_[i] = fragments[i][threadIdx.x % 32];
    }
  }

  __device__ __forceinline__ void load(const T* staged, const int (&corner)[2]) {
#pragma unroll
    for (int i = 0; i < 2 * Tp::kSteps; ++i) {
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        const uint32_t pair =
            *reinterpret_cast<const uint32_t*>(staged + corner[o] + max(place_[i], 0));
        window_[i / 2][i % 2 * 2 + o] = place_[i] < 0 ? 0 : pair;
      }
    }
  }

  // z[position][2 * output + filter] of the two filters of a tile.
  __device__ __forceinline__ void products(int tile, float (&z)[4][4]) const {
#pragma unroll
    for (int step = 0; step < Tp::kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = (j * Tp::kSteps + step) * 4 + tile;
        const uint2 b = kInRegisters ? held_[i] : fragments_[i][threadIdx.x % 32];
        mma_m16n8<T>(z[j], window_[step], {b.x, b.y});
      }
    }
  }

 private:
  static constexpr bool kInRegisters = Tp::kSteps == 1;
  const Shared& fragments_;
  uint2 held_[kInRegisters ? kFragments : 1];
  int place_[2 * Tp::kSteps];
  uint32_t window_[Tp::kSteps][4];
};

// The same in TF32: steps are half as deep, and a lane has single values of a window.
template <typename Tp>
class TF32Products {
 public:
  using Staged = float;
  static constexpr int kBlocks = 2;
  static constexpr int kSteps = (Tp::kWin + 7) / 8, kFragments = 4 * kSteps * 4;
  using Shared = uint2[kFragments][32];

  static __device__ __forceinline__ float stage(float value) {
    return __uint_as_float(round_tf32(__float_as_uint(value)));
  }

  static __device__ __forceinline__ void prepare(const Filters<Tp, float>& filters,
                                                 Shared& fragments) {
    for (int i = threadIdx.x; i < kFragments * 32; i += blockDim.x) {
      const int lane = i % 32, tile = i / 32 % 4, step = i / 128 % kSteps, j = i / (128 * kSteps);
      const int filter = 8 * (lane / 8) + 2 * tile + lane / 4 % 2;
      uint32_t pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int tap = Tp::tap(8 * step + lane % 4 + 4 * e, j);
        pair[e] = round_tf32(__float_as_uint(tap < 0 ? 0.0f : filters.weights[filter][tap]));
      }
      fragments[i / 32][lane] = {pair[0], pair[1]};
    }
  }

  __device__ __forceinline__ TF32Products(const Tiling& tiling, const Filters<Tp, float>&,
                                          const Shared& fragments)
      : fragments_(fragments) {
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const int e = 4 * i + threadIdx.x % 4;
      place_[i] = e < Tp::kWin ? staged_offset<Tp>(tiling, e) : -1;
    }
  }

  __device__ __forceinline__ void load(const float* staged, const int (&corner)[2]) {
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        const float value = staged[corner[o] + max(place_[i], 0)];
        window_[i / 2][i % 2 * 2 + o] = place_[i] < 0 ? 0 : __float_as_uint(value);
      }
    }
  }

  __device__ __forceinline__ void products(int tile, float (&z)[4][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 b = fragments_[(j * kSteps + step) * 4 + tile][threadIdx.x % 32];
        mma_m16n8<float>(z[j], window_[step], {b.x, b.y});
      }
    }
  }

 private:
  const Shared& fragments_;
  int place_[2 * kSteps];
  uint32_t window_[kSteps][4];
};

// The same by multiply-adds, in fp32 or fp64.
template <typename Tp, typename T>
class ScalarProducts {
 public:
  using Staged = T;
  using Shared = int;
  static constexpr int kBlocks = Tp::kWin * sizeof(T) <= 64 ? 2 : 1;

  static __device__ __forceinline__ T stage(T value) { return value; }
  static __device__ __forceinline__ void prepare(const Filters<Tp, T>&, Shared&) {}

  __device__ __forceinline__ ScalarProducts(const Tiling& tiling, const Filters<Tp, T>& filters,
                                            const Shared&)
      : tiling_(tiling), filters_(filters) {}

  __device__ __forceinline__ void load(const T* staged, const int (&corner)[2]) {
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      from_[o] = staged + corner[o];
      if constexpr (kInRegisters) {
#pragma unroll
        for (int e = 0; e < Tp::kWin; e += 2) {  // pairs are aligned: corners and rows are even
          const Vec<T, 2> pair =
              *reinterpret_cast<const Vec<T, 2>*>(from_[o] + staged_offset<Tp>(tiling_, e));
          window_[o][e] = pair.v[0];
          window_[o][e + 1] = pair.v[1];
        }
      }
    }
  }

  __device__ __forceinline__ void products(int tile, T (&z)[4][4]) const {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      const T* row = filters_.weights[threadIdx.x % 4 * 8 + 2 * tile + f];
      T weights[Filters<Tp, T>::kRow];
#pragma unroll
      for (int t = 0; t < Filters<Tp, T>::kRow; t += 4) {
        const Vec<T, 4> four = *reinterpret_cast<const Vec<T, 4>*>(row + t);
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[t + i] = four.v[i];
      }
#pragma unroll
      for (int t = 0; t < Tp::K; ++t) {
#pragma unroll
        for (int o = 0; o < 2; ++o) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int e = Tp::in_window(t) + Tp::shift(j);
            const T value = kInRegisters ? window_[o][e] : from_[o][staged_offset<Tp>(tiling_, e)];
            z[j][2 * o + f] += weights[t] * value;
          }
        }
      }
    }
  }

 private:
  static constexpr bool kInRegisters = Tp::kWin * sizeof(T) <= 192;
  const Tiling& tiling_;
  const Filters<Tp, T>& filters_;
  const T* from_[2];
  T window_[2][kInRegisters ? Tp::kWin : 1];
};

template <typename Tp, typename T, bool kTF32>
using Products =
    std::conditional_t<sizeof(T) == 2, TensorProducts<Tp, T>,
                       std::conditional_t<kTF32, TF32Products<Tp>, ScalarProducts<Tp, T>>>;

}  // namespace braze::cuda::small_k
