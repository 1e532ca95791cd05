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
// registers. Two warpgroups stage the patches of tiles of output rows, through registers; others
// take 128 positions each of the staged tile in turn. Positions behind the end of a row are
// computed and not stored. A filter row's chunks are padded to an even number, which meets pixels
// beside the window with weights of zero: tiles with infinities or NaN go to CUDA cores.
//
// fp32 at its own accuracy: two parts of TF32 of each number. The sum of a filter's row starts from
// zero and is added in fp32, since the tensor cores' additions truncate.
#pragma once

#include "wgmma_stage.cuh"
#include "cuda/common/graph.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/conv2d/halo/store.cuh"

namespace braze::cuda::narrow {

constexpr int kPositions = 128;  // of a product

// Warpgroups that multiply: sums of parts take twice the registers.
constexpr int consumers(int parts) { return parts == 1 ? 3 : 2; }
constexpr int wgmma_threads(int parts) { return consumers(parts) * 128 + kProducers; }
constexpr int wgmma_out_bytes(int size, int parts) {
  return consumers(parts) * (size == 2 ? kPositions * 128 : 4 * halo::kTurnBytes);
}

// The descriptor of an unswizzled K-major operand: rows of 16 bytes, eight of them one behind the
// other; bytes from them to the next eight, and to the other half of a step.
__device__ __forceinline__ uint64_t plain_descriptor(uint32_t address, int next_rows,
                                                     int next_half) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(next_half >> 4) << 16 | static_cast<uint64_t>(next_rows >> 4) << 32;
}

// Bytes from a position's first pixel to that of filter row r + 1, whose number modulo the stride
// is `phase`, stepped on.
struct FilterRows {
  int down = 0, phase = 0;

  __device__ __forceinline__ int next(const WgmmaArgs& a) {
    if (++phase == a.stride_h) phase = 0, ++down;
    return phase * a.phase_bytes + down * a.pitch * kChunk;
  }
};

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
  FilterRows rows;
  for (int r = 1; r < a.taps_h; ++r) {
    multiply_row(wgmma_advance(pixels, rows.next(a)), std::false_type{});
  }
  meanwhile();
  wgmma_wait<0>();
  wgmma_touch(acc);
}

// The same in two parts of TF32. The product of the rests is less than fp32's rounding of a long
// sum; in a short one it counts.
template <int kSteps, typename Meanwhile>
__device__ __forceinline__ void multiply_parts(const WgmmaArgs& a, float (&acc)[kPositions / 2],
                                               uint64_t weights, uint64_t pixels,
                                               const Meanwhile& meanwhile) {
  constexpr int kProducts = kSteps > 2 ? 3 : 4;  // the smallest first
  float sum[kPositions / 2];                     // of a filter row
  const auto multiply_row = [&](uint64_t row) {
    wgmma_touch(sum);
    wgmma_fence();
#pragma unroll
    for (int product = 4 - kProducts; product < 4; ++product) {
      const int w_part = product == 0 || product == 2, x_part = product < 2;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Wgmma<float, kPositions>::template run<0, 0>(
            sum, wgmma_advance(weights, w_part * a.weight_bytes + step * kStepBytes),
            wgmma_advance(row, x_part * a.part_bytes + a.step_bytes[step]),
            product > 4 - kProducts || step > 0);
      }
    }
    wgmma_commit();
    weights = wgmma_advance(weights, kSteps * kStepBytes);
  };
  const auto finish_row = [&] {
    wgmma_wait<0>();
    wgmma_touch(sum);
  };
  multiply_row(pixels);
  meanwhile();
  finish_row();
#pragma unroll
  for (int i = 0; i < kPositions / 2; ++i) acc[i] = sum[i];
  FilterRows rows;
  for (int r = 1; r < a.taps_h; ++r) {
    multiply_row(wgmma_advance(pixels, rows.next(a)));
    finish_row();
#pragma unroll
    for (int i = 0; i < kPositions / 2; ++i) acc[i] += sum[i];
  }
}

// The same of this thread's accumulator i, on CUDA cores and from memory, without what is beside
// the filter; 0 if that is no result.
template <typename T, int kParts>
__device__ __noinline__ float sum_of(const WgmmaArgs& a, int tile, int product, int i) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int k = blockIdx.y * kFilterRows + thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
  const int copy = product / a.products;
  const int position =
      (product - copy * a.products) * kPositions + i / 4 * 8 + lane % 4 * 2 + i % 2;
  const Place at = place_of(a, tile);
  int column;
  const int down = a.by_pitch.div(position, column), right = column * a.copies + copy;
  const int p = at.p + down, q = at.q + right;
  const bool there = down < a.tile_rows && right < a.tile_columns && p < a.rows && q < a.columns;
  if (!there || k >= a.filters) return 0;
  const auto value = [](T v) {
    if constexpr (sizeof(T) == 4 && kParts == 1) {
      return __uint_as_float(round_tf32(__float_as_uint(v)));
    } else {
      return convert<float>(v);
    }
  };
  const T* const w = static_cast<const T*>(a.w) + k * a.w_k;
  const T* const x = static_cast<const T*>(a.x) + at.image * a.x_n;
  float sum = 0;
  for (int r = 0; r < a.taps_h; ++r) {
    const int row = p * a.stride_h - a.pad_h + r;
    for (int s = 0; s < a.taps_w; ++s) {
      const int column = q * a.stride_w - a.pad_w + s;
      const bool inside = row >= 0 && row < a.height && column >= 0 && column < a.width;
      for (int c = 0; c < a.channels; ++c) {
        // Padding is multiplied, too: an infinite weight times zero is NaN.
        const float pixel = inside ? value(x[row * a.x_h + column * a.channels + c]) : 0.0f;
        sum += value(w[c * a.w_c + r * a.w_r + s * a.w_s]) * pixel;
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

template <typename T, int kParts, int kChannels>
__global__ void __launch_bounds__(wgmma_threads(kParts), 1)
    narrow_wgmma_fprop_kernel(const __grid_constant__ WgmmaArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  constexpr bool kStaged = sizeof(T) == 2;
  constexpr int kConsumers = consumers(kParts), kAcc = kPositions / 2;
  constexpr int kOutBytes = wgmma_out_bytes(sizeof(T), kParts) / kConsumers;
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* const out = shared_bytes + (-shared_address(shared_bytes) & 1023);
  unsigned char* const weights = out + kConsumers * kOutBytes;
  __shared__ uint64_t full[kPatchStages], empty[kPatchStages];
  __shared__ int special[kPatchStages];
  __shared__ alignas(8) int offsets[kConsumers][kPositions];  // of outputs from the tile's, or -1

  const int k0 = blockIdx.y * kFilterRows;
  unsigned char* const stages = weights + kParts * a.weight_bytes;
  begin_stages(full, empty, special, kProducers, kConsumers);
  wait_for_earlier_kernels();
  const bool special_weight =
      stage_weights<T, kParts>(a, k0, wgmma_threads(kParts), weights) && kParts > 1;
  fence_async_proxy();
  const bool special_weights = __syncthreads_or(special_weight);

  // From a shuffle the compiler learns that it is the same in all of a warp.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kParts == 1 ? 56 : 64));
    const int own = threadIdx.x - kConsumers * 128;
    for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
      const int stage = j % kPatchStages, turn = j / kPatchStages;
      if (turn > 0) mbarrier_wait(&empty[stage], turn - 1 & 1);
      if (stage_tile<T, T, kParts, kChannels>(a, tile, own, stages + stage * a.stage_bytes)) {
        special[stage] = j + 1;
      }
      fence_async_proxy();
      mbarrier_arrive(&full[stage]);
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kParts == 1 ? 120 : 192));
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
    const bool is_special = special_weights || special[stage] == j + 1;
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
        for (int i = 0; i < kAcc; ++i) acc[i] = sum_of<T, kParts>(a, tile, product, i);
      } else {
        const uint64_t x_desc = plain_descriptor(shared_address(pixels), 128, next_half);
        const auto multiply_steps = [&](auto steps) {
          if constexpr (kParts == 1) {
            multiply<T, decltype(steps)::value>(a, acc, w_desc, x_desc, set_offset);
          } else {
            multiply_parts<decltype(steps)::value>(a, acc, w_desc, x_desc, set_offset);
          }
        };
        switch (a.row_steps) {
          case 1: multiply_steps(std::integral_constant<int, 1>{}); break;
          case 2: multiply_steps(std::integral_constant<int, 2>{}); break;
          case 3: multiply_steps(std::integral_constant<int, 3>{}); break;
          default: multiply_steps(std::integral_constant<int, 4>{}); break;
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
        for (int i = 0; i < kAcc; ++i) acc[i] = bounded(acc[i], a.tail.low, a.tail.high);
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
