// Patches of the input on their way to shared memory.
#pragma once

#include "args.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/predicated.cuh"

namespace braze::cuda::narrow {

// A tile's first output pixel.
struct Place {
  int image, p, q;
};

// Args: of any of the kernels that cut a batch so.
template <typename Args>
__device__ __forceinline__ Place place_of(const Args& a, int tile) {
  int rest, right;
  const int image = a.tiles_of_image.div(tile, rest);
  const int down = a.tiles_across.div(rest, right);
  return {image, down * a.tile_rows, right * a.tile_columns};
}

// Where element e of an image's row of (column, channel) lies from its first.
__device__ __forceinline__ int64_t offset_in_row(const Args& a, int e) {
  if (a.is_linear) return e;
  int channel;
  const int column = a.by_channels.div(e, channel);
  return column * a.x_w + channel * a.x_c;
}

// Rows of words, asynchronously: the caller commits. Zeros outside of the image.
template <typename T>
__device__ __forceinline__ void stage_words(const Args& a, const Place& place, uint32_t* to) {
  constexpr int kPer = per_word(sizeof(T));
  const int first = (place.q * a.stride_w - a.pad_w) * a.channels - a.lead;
  const int width = a.width * a.channels, words = a.pitch / kPer;
  const T* const image = static_cast<const T*>(a.x) + place.image * a.x_n;
  for (int row = threadIdx.x / 32; row < a.patch_rows; row += kWarps) {
    const int h = place.p * a.stride_h - a.pad_h + row;
    const bool in_image = h >= 0 && h < a.height;
    const T* const from = image + (in_image ? h * a.x_h : 0);
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < words; i += 32) {
      const int e = first + i * kPer;
      const bool inside = in_image && e >= 0 && e < width;
      cp_async<4>(to + row * words + i, from + (inside ? offset_in_row(a, e) : 0), inside);
    }
  }
}

// The same of 16-bit elements that do not lie in words: one by one, through registers, for several
// rows at a time so that many are under way.
__device__ __forceinline__ void stage_elements(const Args& a, const Place& place, uint32_t* to) {
  constexpr int kBatch = 8;
  const int first = (place.q * a.stride_w - a.pad_w) * a.channels - a.lead;
  const int width = a.width * a.channels, words = a.pitch / 2;
  const uint16_t* const image = static_cast<const uint16_t*>(a.x) + place.image * a.x_n;
  for (int i = threadIdx.x % 32; i < words; i += 32) {
    bool in_row[2];
    int64_t offset[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int e = first + 2 * i + j;
      in_row[j] = e >= 0 && e < width;
      offset[j] = in_row[j] ? offset_in_row(a, e) : 0;
    }
    for (int row0 = threadIdx.x / 32; row0 < a.patch_rows; row0 += kBatch * kWarps) {
      uint16_t v[kBatch][2];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int row = row0 + b * kWarps, h = place.p * a.stride_h - a.pad_h + row;
        const bool in_image = row < a.patch_rows && h >= 0 && h < a.height;
        const uint16_t* const from = image + (in_image ? h * a.x_h : 0);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          v[b][j] = load_inside<1>(from + offset[j], in_image && in_row[j]).v[0];
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int row = row0 + b * kWarps;
        if (row < a.patch_rows) to[row * words + i] = v[b][0] | uint32_t{v[b][1]} << 16;
      }
    }
  }
}

// A tile's patch; the caller commits, waits and synchronises.
template <typename T>
__device__ __forceinline__ void stage_patch(const Args& a, const Place& place, uint32_t* to) {
  if constexpr (sizeof(T) == 2) {
    if (!a.has_words) return stage_elements(a, place, to);
  }
  stage_words<T>(a, place, to);
}

}  // namespace braze::cuda::narrow
