// The sums of the backward pass over fp32 gradients in TF32: small_k_backward_tensor.cuh's, with
// products half as deep and one value to a word.
#pragma once

#include "small_k_backward_tensor.cuh"

namespace braze::cuda::small_k {

// All bits of the result are the top bit of byte kByte.
template <int kByte>
__device__ __forceinline__ uint32_t spread(uint32_t word) {
  constexpr uint32_t kSign = 8 | kByte;
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, %2;"
      : "=r"(mask)
      : "r"(word), "n"(kSign | kSign << 4 | kSign << 8 | kSign << 12));
  return mask;
}

template <typename Tp, bool kChannelsLast>
__global__ void __launch_bounds__(32 * kMaxTileWarps, kResident)
    backward_tf32_kernel(const __grid_constant__ Tiling tiling, bool vectors, const float* x,
                         const float* dy, const uint32_t* codes, double* __restrict__ partial) {
  wait_for_earlier_kernels();
  constexpr int kSums = Tp::K + 1, kRowTiles = (kSums + 15) / 16;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  float* const staged = reinterpret_cast<float*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int k = static_cast<int>(blockIdx.y) * kFilters + 4 * g;

  // Behind the two buffers of input: one and zero.
  const int size = tiling.staged(Tp::C);
  if (threadIdx.x < 2) staged[2 * size + threadIdx.x] = threadIdx.x ? 0.0f : 1.0f;
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
  Gradients<float, kChannelsLast> next;
  const auto load = [&](const Cursor& at) {
    const Tile tile(tiling, at.index);
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      valid[o] = tile.locate(tiling, 16 * at.group + 4 * t + o, &in_plane[o], &corner[o]);
    }
    next.load(tiling, tile.image, in_plane, valid, vectors, k, dy, codes);
  };
  InputLoader<Tp, TensorPixels<float>> loader(tiling, {tiling, x});
  Cursor cursor{static_cast<int>(blockIdx.x), warp};
  loader.load(Tile(tiling, cursor.index));
  load(cursor);
  int buffer = 0;
  for (int index = cursor.index; index < tiling.tiles; index += gridDim.x) {
    loader.store(Tile(tiling, index), [&](int i, float value) {
      staged[buffer + i] = __uint_as_float(round_tf32(__float_as_uint(value)));
    });
    const int next_index = index + static_cast<int>(gridDim.x);
    if (next_index < tiling.tiles) loader.load(Tile(tiling, next_index));
    __syncthreads();
    for (int group = warp; group < tiling.groups; group += tiling.warps) {
      const Gradients<float, kChannelsLast> now = next;
      int from[4];
#pragma unroll
      for (int o = 0; o < 4; ++o) from[o] = buffer + corner[o];
      if (cursor.next(tiling, tiling.groups)) load(cursor);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of the outputs: the depth of a product
        uint32_t masked[kFilterTiles][4][2];
#pragma unroll
        for (int i = 0; i < kFilterTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int o = 2 * half + e;
            const uint32_t code = now.codes[o] << (k % 8 + i);
            const uint32_t right = spread<Codes::kRight>(code), below = spread<Codes::kBelow>(code);
            const uint32_t active =
                round_tf32(__float_as_uint(now.at(i, o))) & spread<Codes::kActive>(code);
            masked[i][0][e] = active & ~below & ~right;
            masked[i][1][e] = active & ~below & right;
            masked[i][2][e] = active & below & ~right;
            masked[i][3][e] = active & below & right;
          }
        }
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            uint32_t patches[4];
#pragma unroll
            for (int v = 0; v < 4; ++v) {
              const int row = v % 2, o = 2 * half + v / 2;
              patches[v] = __float_as_uint(
                  staged[moves[tile][row] * (from[o] + j / 2 * tiling.pitch + j % 2) +
                         place[tile][row]]);
            }
#pragma unroll
            for (int i = 0; i < kFilterTiles; ++i) {
              mma_m16n8<float>(sum[tile][i], patches, masked[i][j]);
            }
          }
        }
      }
    }
    buffer = size - buffer;  // one barrier a tile is enough
  }
  store_sums<Tp>(tiling, sum, reinterpret_cast<float*>(shared_bytes), partial);
}

}  // namespace braze::cuda::small_k
