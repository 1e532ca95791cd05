// wgmma_wgrad.cuh's product in fp32: of parts of bf16 of dY and of the pixels, three at fp32's
// accuracy, two where TF32 is allowed (wgmma takes operands that lie so in 16 bits only).
//
// What is different: dY comes through registers, too, where it is split. Two warpgroups multiply,
// each with all filter rows of every second step, or, where these are more than four, with every
// second row. Their parts of dY are operands in registers: from shared memory each of a row's
// products would read them again, which takes longer than the product. The tensor cores' additions
// truncate, so they have the sums of a tile only.
#pragma once

#include "wgmma_wgrad.cuh"

namespace braze::cuda::narrow {

constexpr int kPartsConsumers = 2, kPartsThreads = kPartsConsumers * 128 + kProducers;
constexpr int kMostOwn = 4;  // filter rows of a consumer

// A producer's share of dY's tile: 32 bytes of kBatch positions at a time, on their way to planes
// of parts that lie as TMA would write them.
template <int kParts>
struct GradientStager {
  static constexpr int kBatch = 4, kEach = 8, kRowChunks = kFilterRows / kEach;
  static constexpr int kStep = kProducers / kRowChunks;  // positions of all producers at once

  Vec<float, kEach> loaded[kBatch];

  // Of a copy, positions from `first` on. chunk: this thread's, of a position's filters.
  __device__ __forceinline__ void load(const WgmmaWgradArgs& a, const Place& at, int copy, int k,
                                       int first) {
    const float* const dy = static_cast<const float*>(a.y) + at.image * a.y_n + at.p * a.y_h + k;
    const int rows_left = a.rows - at.p, columns_left = min(a.tile_columns, a.columns - at.q);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int position = first + i * kStep;
      int column;
      const int p = a.by_pitch.div(position, column), q = column * a.copies + copy;
      const bool inside = position < a.positions && p < rows_left && q < columns_left;
      const float* const from = dy + (inside ? p * a.y_h + (at.q + q) * a.y_w : 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto four = load_inside<4>(from + 4 * half, inside && k + 4 * half < a.filters);
#pragma unroll
        for (int e = 0; e < 4; ++e) loaded[i].v[4 * half + e] = four.v[e];
      }
    }
  }

  // Returns whether any value is infinite or NaN. to: the copy's first plane.
  __device__ __forceinline__ bool store(const WgmmaWgradArgs& a, int chunk, int first,
                                        unsigned char* to) const {
    bool special = false;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int position = first + i * kStep;
      if (position * kDyRowBytes >= a.dy_bytes) break;
      uint32_t parts[kParts][kEach / 2];
      special |= halo::split_values(loaded[i].v, parts);
      unsigned char* const row = to + position * kDyRowBytes + ((chunk ^ position % 8) << 4);
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        *reinterpret_cast<uint4*>(row + p * a.copies * a.dy_bytes) =
            uint4{parts[p][0], parts[p][1], parts[p][2], parts[p][3]};
      }
    }
    return special;
  }
};

// The parts of dY that a consumer's thread has of a step's 64 filters x 16 positions.
template <int kParts>
struct GradientFragment {
  uint32_t parts[kParts][4];

  // from: this lane's row of the step's first plane.
  __device__ __forceinline__ void load(const unsigned char* from, int plane_bytes) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) ldmatrix_x4_trans(parts[p], from + p * plane_bytes);
  }
};

template <int kParts, int kChannels, int kOwn>
__global__ void __launch_bounds__(kPartsThreads, 1)
    narrow_wgmma_wgrad_parts_kernel(const __grid_constant__ WgmmaWgradArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  using Stager = GradientStager<kParts>;
  using Product = Wgmma<__nv_bfloat16, kTapElements>;
  using Pairs = halo::PartPairs<kParts>;
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* const stages = shared_bytes + (-shared_address(shared_bytes) & 1023);
  __shared__ uint64_t full[kPatchStages], empty[kPatchStages];
  __shared__ int special[kPatchStages];

  const int k0 = blockIdx.y * kFilterRows;
  const int plane_bytes = a.copies * a.dy_bytes, all_dy_bytes = kParts * plane_bytes;
  begin_stages(full, empty, special, kProducers, kPartsConsumers);
  clear_stages(a, stages);
  wait_for_earlier_kernels();

  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group >= kPartsConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    const int own = threadIdx.x - kPartsConsumers * 128;
    const int chunk = own % Stager::kRowChunks, k = k0 + chunk * Stager::kEach;
    Stager gradient;
    for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
      const int stage = j % kPatchStages, turn = j / kPatchStages;
      unsigned char* const dy = stages + stage * a.stage_bytes;
      const Place at = place_of(a, tile);
      int first = own / Stager::kRowChunks, copy = 0;
      gradient.load(a, at, copy, k, first);  // meanwhile the pixels are staged
      if (turn > 0) mbarrier_wait(&empty[stage], turn - 1 & 1);
      bool is_special =
          stage_tile<float, __nv_bfloat16, kParts, kChannels>(a, tile, own, dy + all_dy_bytes);
      for (;;) {
        is_special |= gradient.store(a, chunk, first, dy + copy * a.dy_bytes);
        first += Stager::kBatch * Stager::kStep;
        if (first * kDyRowBytes >= a.dy_bytes) {
          first = own / Stager::kRowChunks;
          if (++copy == a.copies) break;
        }
        gradient.load(a, at, copy, k, first);
      }
      if (is_special) special[stage] = j + 1;
      fence_async_proxy();
      mbarrier_arrive(&full[stage]);
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int row0 = group % a.groups, step0 = a.groups == 1 ? group : 0;
  const int step_by = kPartsConsumers / a.groups;
  const int copy_steps = (a.positions + kDepth - 1) / kDepth, steps = a.copies * copy_steps;
  float sums[kOwn][kRowAcc] = {};
  bool has_rest = false;  // tiles that CUDA cores have added up, in memory
  float* const partial = a.partial + (blockIdx.x * step_by + step0) * a.weights;
  int row_bytes[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) row_bytes[i] = row_bytes_of(a, row0 + i * a.groups);
  // Lane l reads row l % 8, a position, of matrix l / 8; matrices 0 and 1 are eight filters each.
  const int position = lane / 16 * 8 + lane % 8, chunk = thread / 32 * 2 + lane / 8 % 2;
  const int lane_bytes = position * kDyRowBytes + ((chunk ^ position % 8) << 4);

  for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
    const int stage = j % kPatchStages;
    unsigned char* const dy = stages + stage * a.stage_bytes;
    mbarrier_wait(&full[stage], j / kPatchStages & 1);
    if (special[stage] == j + 1) {
      if (step0 == 0) {
        add_tile<float>(a, tile, k0, row0, a.groups, has_rest, partial);
        has_rest = true;
      }
    } else {
      const uint64_t pixels =
          plain_descriptor(shared_address(dy + all_dy_bytes), kChunk, 8 * kChunk);
      float acc[kOwn][kRowAcc];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) wgmma_touch(acc[i]);
      const auto multiply = [&](int step, GradientFragment<kParts>& fragment) {
        const int copy = step >= copy_steps, own_step = step - copy * copy_steps;
        fragment.load(dy + lane_bytes + copy * a.dy_bytes + own_step * kDepth * kDyRowBytes,
                      plane_bytes);
        const uint64_t x = wgmma_advance(pixels, copy * a.copy_bytes + own_step * kDepth * kChunk);
        wgmma_fence();
#pragma unroll
        for (int pair = 0; pair < Pairs::kCount; ++pair) {
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            Product::template run<1>(
                acc[i], fragment.parts[Pairs::first(pair)],
                wgmma_advance(x, row_bytes[i] + Pairs::second(pair) * a.part_bytes),
                pair > 0 || step != step0);
          }
        }
        wgmma_commit();
      };
      // Registers of a step's fragment are free when its products are done.
      GradientFragment<kParts> fragments[2];
      for (int step = step0; step < steps; step += 2 * step_by) {
        multiply(step, fragments[0]);
        wgmma_wait<1>();
        if (step + step_by < steps) {
          multiply(step + step_by, fragments[1]);
          wgmma_wait<1>();
        }
      }
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        wgmma_touch(acc[i]);
        if (step0 >= steps) break;  // a tile of a single step is the other's
#pragma unroll
        for (int v = 0; v < kRowAcc; ++v) sums[i][v] += acc[i][v];
      }
    }
    named_barrier(1 + group, 128);
    if (thread == 0) mbarrier_arrive(&empty[stage]);
  }
  leave_sums(a, sums, k0, row0, a.groups, has_rest, partial);
#endif
}

}  // namespace braze::cuda::narrow
