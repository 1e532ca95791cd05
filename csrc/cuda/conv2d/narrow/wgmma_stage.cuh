// What narrow/wgmma.cuh's and narrow/wgmma_wgrad.cuh's kernels multiply, on its way to shared
// memory: patches of pixels, in chunks of 16 bytes, and the filters.
//
// fp32 at its own accuracy is multiplied in parts, a plane of shared memory each: fprop's two of
// TF32, the weight gradient's three of bf16 (two where TF32 is allowed: wgmma takes operands in its
// layout in 16 bits only).
#pragma once

#include "patch.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/predicated.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/conv2d/halo/split.cuh"
#include "cuda/conv2d/tail.cuh"

namespace braze::cuda::narrow {

constexpr int kChunk = 16, kPixelElements = 4;  // bytes; channels with those that are zero
constexpr int kProducers = 256;
constexpr int kPatchStages = 2, kMostSteps = 4;                         // steps: of a filter row
constexpr int kFilterRows = 64, kStepBytes = kFilterRows * 2 * kChunk;  // of weights

struct WgmmaArgs {
  const void *x, *x_end, *w, *bias;
  void* y;
  Moments* moments;  // a set of each filter for each block's consumers, or nullptr
  int channels, height, width, filters, taps_h, taps_w, rows, columns;  // C H W K R S P Q
  int stride_h, stride_w, pad_h, pad_w;
  int64_t x_n, x_h, y_n, y_h, y_w, w_k, w_c, w_r, w_s;  // strides
  Tail tail;
  bool bounds;  // whether the tail's clamp does anything

  // A tile is tile_rows x tile_columns of an image's outputs.
  int tile_rows, tile_columns, tiles;
  FastDiv tiles_of_image, tiles_across;

  // Its patch: parts, of copies, of phases of rows, of planes, of rows of `pitch` chunks.
  int copies, planes, pitch, patch_rows, row_chunks;  // chunks of a row of all planes
  int plane_bytes, phase_bytes, copy_bytes, part_bytes, stage_bytes;
  int positions, products;     // of a copy: tile_rows * pitch, and fprop's products of them
  int row_steps;               // steps of the sum over a filter row, of two chunks
  int step_bytes[kMostSteps];  // from a row's first chunk to a step's
  int weight_bytes;            // of a part
  FastDiv by_pitch, by_planes, by_stride_h, by_row_chunks;
};

// Barriers of the stages, in shared memory: producers arrive at `full` so many times, consumers at
// `empty`. special: of a stage the last tile, by the block's count from 1, with special values.
__device__ __forceinline__ void begin_stages(uint64_t (&full)[kPatchStages],
                                             uint64_t (&empty)[kPatchStages],
                                             int (&special)[kPatchStages], int producers,
                                             int consumers) {
  if (threadIdx.x >= kPatchStages) return;
  mbarrier_init(&full[threadIdx.x], producers);
  mbarrier_init(&empty[threadIdx.x], consumers);
  mbarrier_init_fence();
  special[threadIdx.x] = 0;
}

// Adds to `seen` what has a sign bit set if one of the word's elements is an infinity or NaN: of
// these the exponent is all ones, and one more is carried beyond it. In fp32 also from 2^127 on,
// where rounding to TF32 may overflow.
template <typename T>
__device__ __forceinline__ void look_for_special(uint32_t& seen, uint32_t word) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (sizeof(T) == 4) {
    seen |= (word & 0x7fffffffu) + 0x01000000u;
  } else {
    seen |= (word & 0x7fff7fffu) + (kHalf ? 0x04000400u : 0x00800080u);
  }
}
template <typename T>
__device__ __forceinline__ bool is_special(uint32_t seen) {
  return seen & (sizeof(T) == 4 ? 0x80000000u : 0x80008000u);
}

// v as the sum of kParts of TF32, the first rounded to nearest: of one, or of two that hold 22
// bits.
template <int kParts>
__device__ __forceinline__ void split_tf32(uint32_t v, uint32_t (&parts)[kParts]) {
  static_assert(kParts == 1 || kParts == 2);
  parts[0] = round_tf32(v);
  if constexpr (kParts == 2) {
    parts[1] = round_tf32(__float_as_uint(__uint_as_float(v) - __uint_as_float(parts[0])));
  }
}

// A row's chunk of Operands, as its words of T lie in the image: of 16 bits, which may begin within
// a word, one more than they fill.
template <typename T, typename Operand, int kChannels>
struct Chunk {
  static constexpr int kPixels = kChunk / (kPixelElements * int{sizeof(Operand)});
  static constexpr int kFilled = kPixels * kChannels * int{sizeof(T)} / 4;
  static constexpr int kWords = sizeof(T) == 2 ? kFilled + 1 : kFilled;

  uint32_t words[kWords];
  bool inside[kPixels];

  // row: an image's; `pixel`: the chunk's first of it; end: of all images.
  __device__ __forceinline__ void load(const T* row, bool in_image, int pixel, int width,
                                       const void* end) {
    bool any = false;
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      inside[p] = in_image && pixel + p >= 0 && pixel + p < width;
      any |= inside[p];
    }
    const auto address = reinterpret_cast<uintptr_t>(row + (any ? pixel * kChannels : 0));
    const bool odd = sizeof(T) == 2 && address & 2;
    const auto* const from = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
    // A tensor of 16 bits may end within a word, whose other half may be nobody's.
    const auto to_end = (reinterpret_cast<uintptr_t>(end) >> 2) - (address >> 2);
    const int last = to_end < kWords ? static_cast<int>(to_end) : -1;
    // Words that have something of a pixel in the image: beside it may be nothing at all.
    const auto has = [&](int element) {
      return element >= 0 && element < kPixels * kChannels && inside[element / kChannels];
    };
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 2) {
        const bool here = has(2 * i);
        const bool wanted = odd ? has(2 * i - 1) || here : here || has(2 * i + 1);
        words[i] = load_word_inside(from + i, wanted && i != last, wanted && i == last);
      } else {
        words[i] = load_inside<1>(from + i, has(i)).v[0];
      }
    }
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kFilled; ++i) {
        words[i] = odd ? __funnelshift_r(words[i], words[i + 1], 16) : words[i];
      }
    }
  }

  // Its parts, with zeros for the missing channels and for what is outside of the image.
  template <int kParts>
  __device__ __forceinline__ void pad(uint4 (&to)[kParts]) const {
    uint32_t v[kParts][4] = {};
    if constexpr (sizeof(Operand) == 4) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        uint32_t parts[kParts];
        split_tf32(words[c], parts);
#pragma unroll
        for (int p = 0; p < kParts; ++p) v[p][c] = parts[p];
      }
    } else if constexpr (sizeof(T) == 4) {
      float values[kPixels * kPixelElements] = {};
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        values[i / kChannels * kPixelElements + i % kChannels] = __uint_as_float(words[i]);
      }
      halo::split_values(values, v);
    } else {
      static_assert(kParts == 1);
      const auto element = [&](int i) { return words[i / 2] >> i % 2 * 16 & 0xffffu; };
#pragma unroll
      for (int p = 0; p < 2; ++p) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          v[0][p * 2 + c / 2] |= element(p * kChannels + c) << c % 2 * 16;
        }
        if (!inside[p]) v[0][p * 2] = 0, v[0][p * 2 + 1] = 0;
      }
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) to[p] = uint4{v[p][0], v[p][1], v[p][2], v[p][3]};
  }
};

// The producers, of which this is number `own`, stage a tile's patch. Returns whether this one met
// a special value.
template <typename T, typename Operand, int kParts, int kChannels>
__device__ __forceinline__ bool stage_tile(const WgmmaArgs& a, int tile, int own,
                                           unsigned char* stage) {
  using C = Chunk<T, Operand, kChannels>;
  constexpr int kBatch = 2;
  const Place at = place_of(a, tile);
  const T* const image = static_cast<const T*>(a.x) + at.image * a.x_n;
  const int first_row = at.p * a.stride_h - a.pad_h, chunks = a.patch_rows * a.row_chunks;
  uint32_t seen = 0;
  for (int copy = 0; copy < a.copies; ++copy) {
    const int first = (at.q + copy) * a.stride_w - a.pad_w;
    unsigned char* const to = stage + copy * a.copy_bytes;
    for (int number = own; number < chunks; number += kProducers * kBatch) {
      C loaded[kBatch];
      int rows[kBatch], columns[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int chunk = number + i * kProducers;
        rows[i] = a.by_row_chunks.div(chunk, columns[i]);
        const int h = first_row + rows[i];
        const bool in_image = chunk < chunks && h >= 0 && h < a.height;
        loaded[i].load(image + (in_image ? h * a.x_h : 0), in_image,
                       first + columns[i] * C::kPixels, a.width, a.x_end);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (number + i * kProducers >= chunks) break;
        int down = rows[i], phase = 0, slot = columns[i], plane = 0;
        if (a.stride_h > 1) down = a.by_stride_h.div(rows[i], phase);
        if (a.planes > 1) slot = a.by_planes.div(columns[i], plane);
        const int byte =
            phase * a.phase_bytes + plane * a.plane_bytes + (down * a.pitch + slot) * kChunk;
        uint4 parts[kParts];
        loaded[i].pad(parts);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          *reinterpret_cast<uint4*>(to + p * a.part_bytes + byte) = parts[p];
        }
#pragma unroll
        for (int w = 0; w < C::kFilled; ++w) look_for_special<T>(seen, loaded[i].words[w]);
      }
    }
  }
  return is_special<T>(seen);
}

// The block's filters, by all of its `threads`: for each step two halves of 64 rows of a chunk.
// Returns whether this thread met a special value.
template <typename T, int kParts>
__device__ __forceinline__ bool stage_weights(const WgmmaArgs& a, int k0, int threads,
                                              unsigned char* to) {
  constexpr int kEach = kChunk / int{sizeof(T)};
  const int chunks = a.taps_h * a.row_steps * 2 * kFilterRows;
  const T* const w = static_cast<const T*>(a.w);
  uint32_t seen = 0;
  for (int i = threadIdx.x; i < chunks; i += threads) {
    const int k = k0 + i % kFilterRows, half = i / kFilterRows;
    const int r = half / (2 * a.row_steps), chunk = half - r * 2 * a.row_steps;
    Vec<T, kEach> parts[kParts];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int s = (chunk * kEach + e) / kPixelElements, c = e % kPixelElements;
      const bool there = k < a.filters && s < a.taps_w && c < a.channels;
      T value = w[there ? k * a.w_k + c * a.w_c + r * a.w_r + s * a.w_s : 0];
      if (!there) value = convert<T>(0.0f);
      if constexpr (sizeof(T) == 4) {
        uint32_t v[kParts];
        split_tf32(__float_as_uint(value), v);
#pragma unroll
        for (int p = 0; p < kParts; ++p) parts[p].v[e] = __uint_as_float(v[p]);
        look_for_special<T>(seen, __float_as_uint(value));
      } else {
        parts[0].v[e] = value;
      }
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      *reinterpret_cast<Vec<T, kEach>*>(to + p * a.weight_bytes + i * kChunk) = parts[p];
    }
  }
  return is_special<T>(seen);
}

}  // namespace braze::cuda::narrow
