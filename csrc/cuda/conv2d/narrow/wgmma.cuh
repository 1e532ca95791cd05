// First layers on Hopper's tensor cores, fprop: images of up to four channels, without a gather.
//
// Shared memory has a pixel as four channels, the missing ones zero: a chunk of 16 bytes is a pixel
// of fp32 or two neighbours of 16 bits. Unswizzled wgmma operands are made of matrices of eight
// rows of 16 bytes, one behind the other; where an output's window begins a chunk behind that of
// the output before it, a column of chunks is such rows as it lies, and the chunks of a filter row
// are the same memory a few rows further on. So the tensor cores read each staged pixel in every
// window that has it. For that:
// - with larger strides, chunk c of a row lies in plane c % planes, where the next output's is
// next;
// - rows whose number differs modulo the stride lie apart (phases), so that the rows of a window's
//   column of taps are shifts by whole rows;
// - with an odd stride in 16 bits every other window begins within a chunk: those of odd outputs
//   read another copy, staged a pixel further on.
//
// D (64 filters x 128 outputs) += W_step (64 x 32 bytes) X_step (32 bytes x 128): as in
// halo/wgmma.cuh filters are the rows, so that batch statistics are sums along a thread's own
// registers. A warpgroup stages the patches of tiles of output rows, through registers; three
// others take 128 positions each of the staged tile in turn. Positions behind the end of a row are
// computed and not stored. A filter row's chunks are padded to an even number, which meets pixels
// beside the window with weights of zero: tiles with infinities or NaN go to CUDA cores.
#pragma once

#include "patch.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/graph.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/predicated.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/conv2d/halo/store.cuh"
#include "cuda/conv2d/tail.cuh"

namespace braze::cuda::narrow {

constexpr int kChunk = 16, kPixelElements = 4;  // bytes; channels with those that are zero
constexpr int kPositions = 128;                 // of a product
constexpr int kConsumers = 3, kProducers = 256;
constexpr int kWgmmaThreads = kConsumers * 128 + kProducers;
constexpr int kPatchStages = 2, kMostSteps = 4;                         // steps: of a filter row
constexpr int kFilterRows = 64, kStepBytes = kFilterRows * 2 * kChunk;  // of weights

struct WgmmaArgs {
  const void *x, *w, *bias;
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

  // Its patch: copies, of phases of rows, of planes, of rows of `pitch` chunks.
  int copies, planes, pitch, patch_rows, row_chunks;  // chunks of a row of all planes
  int plane_bytes, phase_bytes, copy_bytes, stage_bytes;
  int positions, products;     // of a copy: tile_rows * pitch, and of kPositions
  int row_steps;               // steps of the sum over a filter row, of two chunks
  int step_bytes[kMostSteps];  // from a row's first chunk to a step's
  FastDiv by_pitch, by_planes, by_stride_h, by_row_chunks;
};

inline int wgmma_weight_bytes(const WgmmaArgs& a) { return a.taps_h * a.row_steps * kStepBytes; }
constexpr int wgmma_out_bytes(int size) {
  return kConsumers * (size == 2 ? kPositions * 128 : 4 * halo::kTurnBytes);
}

// The descriptor of an unswizzled K-major operand: rows of 16 bytes, eight of them one behind the
// other; bytes from them to the next eight, and to the other half of a step.
__device__ __forceinline__ uint64_t plain_descriptor(uint32_t address, int next_rows,
                                                     int next_half) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(next_half >> 4) << 16 | static_cast<uint64_t>(next_rows >> 4) << 32;
}

// Adds to `seen` what has a sign bit set if one of the word's elements is an infinity or NaN: of
// these the exponent is all ones, and one more is carried beyond it.
template <typename T>
__device__ __forceinline__ void look_for_special(uint32_t& seen, uint32_t word) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (sizeof(T) == 4) {
    seen |= (word & 0x7fffffffu) + 0x00800000u;
  } else {
    seen |= (word & 0x7fff7fffu) + (kHalf ? 0x04000400u : 0x00800080u);
  }
}
template <typename T>
__device__ __forceinline__ bool is_special(uint32_t seen) {
  return seen & (sizeof(T) == 4 ? 0x80000000u : 0x80008000u);
}

// Chunks of a row, as their words lie in the image: of 16 bits, which may begin within a word, one
// more than they fill.
template <typename T, int kChannels>
struct Chunk {
  static constexpr int kPixels = kChunk / (kPixelElements * int{sizeof(T)});
  static constexpr int kFilled = kPixels * kChannels * int{sizeof(T)} / 4;
  static constexpr int kWords = sizeof(T) == 2 ? kFilled + 1 : kFilled;

  uint32_t words[kWords];
  bool inside[kPixels];

  // row: an image's; `pixel`: the chunk's first of it.
  __device__ __forceinline__ void load(const T* row, bool in_image, int pixel, int width) {
    bool any = false;
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      inside[p] = in_image && pixel + p >= 0 && pixel + p < width;
      any |= inside[p];
    }
    const auto address = reinterpret_cast<uintptr_t>(row + (any ? pixel * kChannels : 0));
    const bool odd = sizeof(T) == 2 && address & 2;
    const auto* const from = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
    // Words that have something of a pixel in the image: beside it may be nothing at all.
    const auto has = [&](int element) {
      return element >= 0 && element < kPixels * kChannels && inside[element / kChannels];
    };
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      bool wanted = inside[0];
      if constexpr (sizeof(T) == 2) {
        const bool here = has(2 * i);
        wanted = odd ? has(2 * i - 1) || here : here || has(2 * i + 1);
      }
      words[i] = load_inside<1>(from + i, wanted).v[0];
    }
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kFilled; ++i) {
        words[i] = odd ? __funnelshift_r(words[i], words[i + 1], 16) : words[i];
      }
    }
  }

  // With zeros for the missing channels and for what is outside of the image.
  __device__ __forceinline__ uint4 padded() const {
    uint32_t v[4] = {};
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) v[c] = inside[0] ? round_tf32(words[c]) : 0;
    } else {
      const auto element = [&](int i) { return words[i / 2] >> i % 2 * 16 & 0xffffu; };
#pragma unroll
      for (int p = 0; p < 2; ++p) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          v[p * 2 + c / 2] |= element(p * kChannels + c) << c % 2 * 16;
        }
        if (!inside[p]) v[p * 2] = 0, v[p * 2 + 1] = 0;
      }
    }
    return {v[0], v[1], v[2], v[3]};
  }
};

// The producers, of which this is number `own`, stage a tile's patch. Returns whether this one met
// an infinity or NaN.
template <typename T, int kChannels>
__device__ __forceinline__ bool stage_tile(const WgmmaArgs& a, int tile, int own,
                                           unsigned char* stage) {
  using C = Chunk<T, kChannels>;
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
                       first + columns[i] * C::kPixels, a.width);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (number + i * kProducers >= chunks) break;
        int down = rows[i], phase = 0, slot = columns[i], plane = 0;
        if (a.stride_h > 1) down = a.by_stride_h.div(rows[i], phase);
        if (a.planes > 1) slot = a.by_planes.div(columns[i], plane);
        const int byte =
            phase * a.phase_bytes + plane * a.plane_bytes + (down * a.pitch + slot) * kChunk;
        *reinterpret_cast<uint4*>(to + byte) = loaded[i].padded();
#pragma unroll
        for (int w = 0; w < C::kFilled; ++w) look_for_special<T>(seen, loaded[i].words[w]);
      }
    }
  }
  return is_special<T>(seen);
}

// The block's filters: for each step two halves of 64 rows of a chunk.
template <typename T>
__device__ __forceinline__ void stage_weights(const WgmmaArgs& a, int k0, unsigned char* to) {
  constexpr int kEach = kChunk / int{sizeof(T)};
  const int chunks = a.taps_h * a.row_steps * 2 * kFilterRows;
  const T* const w = static_cast<const T*>(a.w);
  for (int i = threadIdx.x; i < chunks; i += kWgmmaThreads) {
    const int k = k0 + i % kFilterRows, half = i / kFilterRows;
    const int r = half / (2 * a.row_steps), chunk = half - r * 2 * a.row_steps;
    Vec<T, kEach> v;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int s = (chunk * kEach + e) / kPixelElements, c = e % kPixelElements;
      const bool there = k < a.filters && s < a.taps_w && c < a.channels;
      const T value = w[there ? k * a.w_k + c * a.w_c + r * a.w_r + s * a.w_s : 0];
      v.v[e] = there ? value : convert<T>(0.0f);
      if constexpr (sizeof(T) == 4) {
        v.v[e] = __uint_as_float(round_tf32(__float_as_uint(v.v[e])));
      }
    }
    *reinterpret_cast<Vec<T, kEach>*>(to + i * kChunk) = v;
  }
}

// acc = W X over all taps, for the positions that `pixels` begins with. kSteps: of a filter row.
// meanwhile() is called while the products are under way.
template <typename T, int kSteps, typename Meanwhile>
__device__ __forceinline__ void multiply(const WgmmaArgs& a, float (&acc)[kPositions / 2],
                                         uint64_t weights, uint64_t pixels,
                                         const Meanwhile& meanwhile) {
  const auto multiply_row = [&](uint64_t row, auto is_first) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Wgmma<T, kPositions>::template run<0, 0>(acc, wgmma_advance(weights, step * kStepBytes),
                                               wgmma_advance(row, a.step_bytes[step]),
                                               !is_first || step > 0);
    }
    wgmma_commit();
    weights = wgmma_advance(weights, kSteps * kStepBytes);
  };
  wgmma_touch(acc);
  multiply_row(pixels, std::true_type{});
  for (int r = 1, down = 0, phase = 0; r < a.taps_h; ++r) {
    if (++phase == a.stride_h) phase = 0, ++down;
    const int bytes = phase * a.phase_bytes + down * a.pitch * kChunk;
    multiply_row(wgmma_advance(pixels, bytes), std::false_type{});
  }
  meanwhile();
  wgmma_wait<0>();
  wgmma_touch(acc);
}

// The same of one result, on CUDA cores, without what is beside the filter.
template <typename T>
__device__ __noinline__ float sum_of(const WgmmaArgs& a, const unsigned char* weights,
                                     const unsigned char* pixels, int filter, int position) {
  constexpr int kPixels = kChunk / (kPixelElements * int{sizeof(T)});
  float sum = 0;
  for (int r = 0; r < a.taps_h; ++r) {
    const int down = r / a.stride_h, phase = r - down * a.stride_h;
    for (int s = 0; s < a.taps_w; ++s) {
      const int chunk = s / kPixels, slot = chunk / a.planes, plane = chunk - slot * a.planes;
      const unsigned char* const w =
          weights + r * a.row_steps * kStepBytes + (chunk * kFilterRows + filter) * kChunk;
      const unsigned char* const x = pixels + phase * a.phase_bytes + plane * a.plane_bytes +
                                     (position + down * a.pitch + slot) * kChunk;
      for (int c = 0; c < kPixelElements; ++c) {  // of which the missing ones are zeros
        const int e = s % kPixels * kPixelElements + c;
        sum += convert<float>(reinterpret_cast<const T*>(w)[e]) *
               convert<float>(reinterpret_cast<const T*>(x)[e]);
      }
    }
  }
  return sum;
}

// 16 bits: a consumer's results from shared memory, as stage_results() left them, 16 bytes at a
// time. to: of the block's first filter; `left` filters from there on.
template <typename T>
__device__ __forceinline__ void store_staged(const unsigned char* out,
                                             const int (&offsets)[kPositions], int left, T* to) {
  const int thread = threadIdx.x % 128, chunk = thread % 8;
#pragma unroll
  for (int i = 0; i < kPositions / 16; ++i) {
    const int position = i * 16 + thread / 8, offset = offsets[position];
    const uint4 v =
        *reinterpret_cast<const uint4*>(out + position * 128 + ((chunk ^ position % 8) << 4));
    if (offset >= 0 && chunk * 8 < left) *reinterpret_cast<uint4*>(to + offset + chunk * 8) = v;
  }
}

// Gives the rows' moments a shift, of the four lanes' first result that is one of the image's;
// false if there is none. The same in all of a warp.
template <typename T>
__device__ __forceinline__ bool set_shifts(const float (&acc)[kPositions / 2], uint32_t valid,
                                           halo::Accumulator (&moments)[2]) {
  float first[2] = {};
#pragma unroll
  for (int i = kPositions / 4 - 1; i >= 0; --i) {
    if (valid >> i & 1) first[0] = acc[i / 2 * 4 + i % 2], first[1] = acc[i / 2 * 4 + i % 2 + 2];
  }
  const uint32_t found = __ballot_sync(~0u, valid != 0) & 0xf;  // all quads have the same positions
  if (found == 0) return false;
  const int from = (threadIdx.x % 32 & ~3) + __ffs(found) - 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    moments[i].shift = __shfl_sync(~0u, convert<float>(convert<T>(first[i])), from);
  }
  return true;
}

template <typename T, int kChannels>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    narrow_wgmma_fprop_kernel(const __grid_constant__ WgmmaArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  constexpr bool kStaged = sizeof(T) == 2;
  constexpr int kAcc = kPositions / 2, kOutBytes = wgmma_out_bytes(sizeof(T)) / kConsumers;
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* const out = shared_bytes + (-shared_address(shared_bytes) & 1023);
  unsigned char* const weights = out + kConsumers * kOutBytes;
  __shared__ uint64_t full[kPatchStages], empty[kPatchStages];
  __shared__ int special[kPatchStages];  // the last tile of the stage, by the block's count from 1
  __shared__ alignas(8) int offsets[kConsumers][kPositions];  // of outputs from the tile's, or -1

  const int k0 = blockIdx.y * kFilterRows;
  unsigned char* const stages = weights + a.taps_h * a.row_steps * kStepBytes;
  if (threadIdx.x < kPatchStages) {
    mbarrier_init(&full[threadIdx.x], kProducers);
    mbarrier_init(&empty[threadIdx.x], kConsumers);
    mbarrier_init_fence();
    special[threadIdx.x] = 0;
  }
  wait_for_earlier_kernels();
  stage_weights<T>(a, k0, weights);
  fence_async_proxy();
  __syncthreads();

  // From a shuffle the compiler learns that it is the same in all of a warp.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const int own = threadIdx.x - kConsumers * 128;
    for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
      const int stage = j % kPatchStages, turn = j / kPatchStages;
      if (turn > 0) mbarrier_wait(&empty[stage], turn - 1 & 1);
      if (stage_tile<T, kChannels>(a, tile, own, stages + stage * a.stage_bytes)) {
        special[stage] = j + 1;
      }
      fence_async_proxy();
      mbarrier_arrive(&full[stage]);
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 120;");
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int row = warp * 16 + lane / 4;  // of the accumulator: this filter and the one 8 on
  unsigned char* const own_out = out + group * kOutBytes;
  float scale[2] = {1, 1}, offset[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int k = k0 + row + 8 * i;
    if (k >= a.filters) continue;
    if (a.bias) offset[i] = convert<float>(static_cast<const T*>(a.bias)[k]);
    if (!a.tail.mean) continue;
    const float2 of = a.tail.coefficients(k);
    scale[i] = of.x, offset[i] = of.y;
  }
  const bool scales = a.bias || a.tail.mean;
  int count = 0;
  bool is_first = true;
  halo::Accumulator row_moments[2];
  float acc[kAcc];
  const uint64_t w_desc = plain_descriptor(shared_address(weights), 128, kFilterRows * kChunk);
  const int next_half = a.planes == 1 ? kChunk : a.plane_bytes;

  for (int j = 0, number = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
    const int stage = j % kPatchStages;
    const Place at = place_of(a, tile);
    const int rows_left = a.rows - at.p;
    const int columns_left = min(a.tile_columns, a.columns - at.q);
    const int64_t first = at.image * a.y_n + at.p * a.y_h + at.q * a.y_w;
    mbarrier_wait(&full[stage], j / kPatchStages & 1);
    const bool is_special = special[stage] == j + 1;
    for (int product = 0; product < a.copies * a.products; ++product) {
      if (number++ % kConsumers != group) continue;
      const int copy = product / a.products, position0 = (product - copy * a.products) * kPositions;
      unsigned char* const pixels =
          stages + stage * a.stage_bytes + copy * a.copy_bytes + position0 * kChunk;
      const auto set_offset = [&] {
        named_barrier(1 + group, 128);  // nobody reads the old offsets, and `out` is free
        const int position = position0 + thread;
        int i;
        const int p = a.by_pitch.div(position, i), q = i * a.copies + copy;
        const bool inside = position < a.positions && p < rows_left && q < columns_left;
        offsets[group][thread] = inside ? static_cast<int>(p * a.y_h + q * a.y_w) : -1;
        named_barrier(1 + group, 128);
      };
      if (is_special) {
        set_offset();
#pragma unroll
        for (int i = 0; i < kAcc; ++i) {
          const int position = i / 4 * 8 + lane % 4 * 2 + i % 2;
          // Beyond the tile may be anything, and nobody asks for it.
          acc[i] = position0 + position < a.positions
                       ? sum_of<T>(a, weights, pixels, row + i / 2 % 2 * 8, position)
                       : 0;
        }
      } else {
        const uint64_t x_desc = plain_descriptor(shared_address(pixels), 128, next_half);
        switch (a.row_steps) {
          case 1: multiply<T, 1>(a, acc, w_desc, x_desc, set_offset); break;
          case 2: multiply<T, 2>(a, acc, w_desc, x_desc, set_offset); break;
          case 3: multiply<T, 3>(a, acc, w_desc, x_desc, set_offset); break;
          default: multiply<T, 4>(a, acc, w_desc, x_desc, set_offset); break;
        }
      }

      if (scales) {
#pragma unroll
        for (int i = 0; i < kAcc; ++i) {
          acc[i] = fmaf(acc[i], scale[i / 2 % 2], offset[i / 2 % 2]);
        }
      }
      if (a.bounds) {
#pragma unroll
        for (int i = 0; i < kAcc; ++i) acc[i] = a.tail.bounded(acc[i]);
      }
      // Of what is stored: a channel of one value then has that mean, and no variance.
      uint32_t valid = 0;  // bit i: position 8 * (i / 2) + 2 * (lane % 4) + i % 2
      if (a.moments) {
#pragma unroll
        for (int i = 0; i < kPositions / 4; i += 2) {
          const int2 o = *reinterpret_cast<const int2*>(&offsets[group][i * 4 + lane % 4 * 2]);
          valid |= static_cast<uint32_t>((o.x >= 0) + 2 * (o.y >= 0)) << i;
        }
        if (is_first) {
          is_first = !set_shifts<T>(acc, valid, row_moments);
        }
        count += __popc(valid);
      }
      const auto add_moments = [&](int i, const float(&v)[4]) {  // of accumulators i to i + 3
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (valid >> (i / 2 + e) & 1) {
            row_moments[0].add(v[e]);
            row_moments[1].add(v[2 + e]);
          }
        }
      };
      T* const to = static_cast<T*>(a.y) + first;
      if constexpr (kStaged) {
        halo::stage_results<T, kPositions>(acc, own_out, a.moments != nullptr, add_moments);
        named_barrier(1 + group, 128);
        store_staged<T>(own_out, offsets[group], a.filters - k0, to + k0);
      } else {
        if (a.moments) {
#pragma unroll
          for (int i = 0; i < kAcc; i += 4) {
            add_moments(i, {acc[i], acc[i + 1], acc[i + 2], acc[i + 3]});
          }
        }
        halo::store_wide<kPositions>(acc, a.filters, offsets[group], k0, own_out, to);
      }
    }
    named_barrier(1 + group, 128);  // all of the group have read the stage
    if (thread == 0) mbarrier_arrive(&empty[stage]);
  }
  if (a.moments) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Moments merged = halo::merge_quad(row_moments[half], count);
      const int k = k0 + row + 8 * half;
      if (lane % 4 == 0 && k < a.filters) {
        a.moments[(int64_t{k} * gridDim.x + blockIdx.x) * kConsumers + group] = merged;
      }
    }
  }
#endif
}

}  // namespace braze::cuda::narrow
