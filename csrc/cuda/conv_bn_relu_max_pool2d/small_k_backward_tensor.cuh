// The sums of the backward pass over 16-bit gradients, on tensor cores.
#pragma once

#include "cuda/common/mma.cuh"
#include "small_k.cuh"

namespace braze::cuda::small_k {

constexpr int kFilterTiles = kFilters / 8;
constexpr int kResident = 2;  // blocks of a multiprocessor

// The gradients and codes of one lane's part of 16 outputs: outputs 4t to 4t + 3, filters 4g to
// 4g + 3 of the block's. Kept in the words that they were loaded in: taking them apart at once
// would wait for the loads.
template <typename T, bool kChannelsLast>
struct Gradients {
  using Four = std::conditional_t<sizeof(T) == 2, uint2, float4>;
  Four raw[4];  // four values. NHWC: filters of raw[output]; NCHW: outputs of raw[filter]
  uint32_t codes[4];

  __device__ __forceinline__ void load(const Tiling& tiling, int image, const int (&in_plane)[4],
                                       const bool (&valid)[4], bool vectors, int k, const T* dy,
                                       const uint32_t* words) {
    const int64_t first = int64_t{image} * tiling.plane;
    words += first * tiling.words + k / 8;
    dy += kChannelsLast ? first * tiling.k + k : (int64_t{image} * tiling.k + k) * tiling.plane;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      codes[o] = valid[o] && k < tiling.k ? words[in_plane[o] * tiling.words] : 0;
      raw[o] = {};
    }
    if (vectors) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int at = kChannelsLast ? in_plane[v] * tiling.k : v * tiling.plane + in_plane[0];
        const bool there = kChannelsLast ? valid[v] && k < tiling.k : valid[0] && k + v < tiling.k;
        if (there) raw[v] = *reinterpret_cast<const Four*>(dy + at);
      }
      return;
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      Vec<T, 4> values;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int o = kChannelsLast ? v : e, f = kChannelsLast ? e : v;
        const int at = kChannelsLast ? in_plane[o] * tiling.k + f : f * tiling.plane + in_plane[o];
        values.v[e] = valid[o] && k + f < tiling.k ? dy[at] : convert<T>(0.0f);
      }
      raw[v] = reinterpret_cast<const Four&>(values);
    }
  }

  // 16 bits: outputs 2 * half and 2 * half + 1 of a filter, the first in the low half.
  __device__ __forceinline__ uint32_t pair(int filter, int half) const {
    if constexpr (!kChannelsLast) return half ? raw[filter].y : raw[filter].x;
    const uint2 first = raw[2 * half], second = raw[2 * half + 1];
    return __byte_perm(filter / 2 ? first.y : first.x, filter / 2 ? second.y : second.x,
                       filter % 2 ? 0x7632 : 0x5410);
  }

  // fp32: an output of a filter.
  __device__ __forceinline__ float at(int filter, int output) const {
    const float4 v = raw[kChannelsLast ? output : filter];
    const int e = kChannelsLast ? filter : output;
    return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w;
  }
};

// A mask for two outputs from the top bits of byte kByte of their words.
template <int kByte>
__device__ __forceinline__ uint32_t spread(uint32_t first, uint32_t second) {
  // Selectors 8 to 15: a byte's sign, from `first` and then from `second`.
  constexpr uint32_t kFirst = 8 | kByte, kSecond = 12 | kByte;
  uint32_t mask;
  asm("prmt.b32 %0, %1, %2, %3;"
      : "=r"(mask)
      : "r"(first), "r"(second), "n"(kFirst | kFirst << 4 | kSecond << 8 | kSecond << 12));
  return mask;
}

// The block's sums of a tensor-core kernel, warp after warp, to its place. dump: shared memory of
// tensor_dump_bytes.
template <typename Tp, int kRowTiles>
__device__ __forceinline__ void store_sums(const Tiling& tiling,
                                           const float (&sum)[kRowTiles][kFilterTiles][4],
                                           float* dump, double* __restrict__ partial) {
  constexpr int kSums = Tp::K + 1, kPitch = kFilters + 1;  // dump[warps][16 * kRowTiles][kPitch]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRowTiles * kFilterTiles * 4; ++i) {
    const int tile = i / (4 * kFilterTiles), column = i / 4 % kFilterTiles, e = i % 4;
    const int row = 16 * tile + g + e / 2 * 8, filter = 4 * (2 * t + e % 2) + column;
    dump[(warp * 16 * kRowTiles + row) * kPitch + filter] = sum[tile][column][e];
  }
  __syncthreads();
  partial += (int64_t{blockIdx.x} * gridDim.y + blockIdx.y) * kFilters * kSums;
  for (int i = threadIdx.x; i < kFilters * kSums; i += blockDim.x) {
    double total = 0;
    for (int v = 0; v < tiling.warps; ++v) {
      total += dump[(v * 16 * kRowTiles + i % kSums) * kPitch + i / kSums];
    }
    partial[i] = total;
  }
}

// Sums over 16 outputs at a time on tensor cores: (patches and a row of ones, transposed) x
// gradients, once for each of the four positions, with gradients that are zero where the maximum is
// elsewhere. Words of the staged input hold two adjacent values, so that a load serves the two
// positions side by side.
template <typename Tp, typename T, bool kChannelsLast>
__global__ void __launch_bounds__(32 * kMaxTileWarps, kResident)
    backward_tensor_kernel(const __grid_constant__ Tiling tiling, bool vectors, const T* x,
                           const T* dy, const uint32_t* codes, double* __restrict__ partial) {
  wait_for_earlier_kernels();
  constexpr int kSums = Tp::K + 1, kRowTiles = (kSums + 15) / 16;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  uint32_t* const staged = reinterpret_cast<uint32_t*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int k = static_cast<int>(blockIdx.y) * kFilters + 4 * g;

  // Behind the two buffers of input: a pair of ones and a pair of zeros.
  const int size = tiling.staged(Tp::C);
  if (threadIdx.x < 2) {
    const Vec<T, 2> pair{convert<T>(threadIdx.x ? 0.0f : 1.0f),
                         convert<T>(threadIdx.x ? 0.0f : 1.0f)};
    staged[2 * size + threadIdx.x] = reinterpret_cast<const uint32_t&>(pair);
  }
  // Where rows g and g + 8 of each tile of sums find their tap: moves * (buffer + corner) + place.
  int place[kRowTiles][2], moves[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int tap = 8 * i + g;
    moves[i / 2][i % 2] = tap < Tp::K;
    place[i / 2][i % 2] = tap < Tp::K    ? staged_offset<Tp>(tiling, Tp::in_window(tap))
                          : tap == Tp::K ? 2 * size
                                         : 2 * size + 1;
  }

  float sum[kRowTiles][kFilterTiles][4] = {};
  int in_plane[4], corner[4];
  bool valid[4];
  Gradients<T, kChannelsLast> next;
  const auto load = [&](const Cursor& at) {
    const Tile tile(tiling, at.index);
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      valid[o] = tile.locate(tiling, 16 * at.group + 4 * t + o, &in_plane[o], &corner[o]);
    }
    next.load(tiling, tile.image, in_plane, valid, vectors, k, dy, codes);
  };
  InputLoader<Tp, TensorPixels<T>> loader(tiling, {tiling, x});
  Cursor cursor{static_cast<int>(blockIdx.x), warp};
  loader.load(Tile(tiling, cursor.index));
  load(cursor);
  int buffer = 0;
  for (int index = cursor.index; index < tiling.tiles; index += gridDim.x) {
    T* const input = reinterpret_cast<T*>(staged + buffer);
    loader.store(Tile(tiling, index), [&](int i, T value) {
      input[2 * i] = value;
      if (i > 0) input[2 * i - 1] = value;
    });
    const int next_index = index + static_cast<int>(gridDim.x);
    if (next_index < tiling.tiles) loader.load(Tile(tiling, next_index));
    __syncthreads();
    for (int group = warp; group < tiling.groups; group += tiling.warps) {
      const Gradients<T, kChannelsLast> now = next;
      uint32_t patches[kRowTiles][4][4];  // position, then as mma wants it
#pragma unroll
      for (int i = 0; i < kRowTiles * 8; ++i) {
        const int tile = i / 8, half = i / 4 % 2, row = i / 2 % 2, below = i % 2;
        uint32_t words[2];
#pragma unroll
        for (int o = 0; o < 2; ++o) {
          words[o] =
              staged[moves[tile][row] * (buffer + corner[2 * half + o] + below * tiling.pitch) +
                     place[tile][row]];
        }
        patches[tile][2 * below][row + 2 * half] = __byte_perm(words[0], words[1], 0x5410);
        patches[tile][2 * below + 1][row + 2 * half] = __byte_perm(words[0], words[1], 0x7632);
      }
      if (cursor.next(tiling, tiling.groups)) load(cursor);
#pragma unroll
      for (int i = 0; i < kFilterTiles; ++i) {
        uint32_t masked[4][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int shift = k % 8 + i;
          const uint32_t first = now.codes[2 * half] << shift;
          const uint32_t second = now.codes[2 * half + 1] << shift;
          const uint32_t right = spread<Codes::kRight>(first, second);
          const uint32_t below = spread<Codes::kBelow>(first, second);
          const uint32_t active = now.pair(i, half) & spread<Codes::kActive>(first, second);
          masked[0][half] = active & ~below & ~right;
          masked[1][half] = active & ~below & right;
          masked[2][half] = active & below & ~right;
          masked[3][half] = active & below & right;
        }
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int j = 0; j < 4; ++j) mma_m16n8<T>(sum[tile][i], patches[tile][j], masked[j]);
        }
      }
    }
    buffer = size - buffer;  // one barrier a tile is enough
  }

  store_sums<Tp>(tiling, sum, reinterpret_cast<float*>(shared_bytes), partial);
}

template <typename Tp>
int tensor_dump_bytes(const Tiling& tiling) {
  const int rows = (Tp::K + 16) / 16 * 16;  // K + 1 in whole tiles
  return tiling.warps * rows * (kFilters + 1) * static_cast<int>(sizeof(float));
}

}  // namespace braze::cuda::small_k
