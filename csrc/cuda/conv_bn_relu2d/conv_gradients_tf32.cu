// conv_bn_pool_backward.h where fp32 may be multiplied as TF32: conv_gradients.cu's kernel, with
// operands of its own.
//
// TF32's products of the weight's gradient would need operands with pixels innermost, which neither
// z nor x has; fp16 has TF32's mantissa, takes operands either way and is twice as fast. What it
// lacks is the range of exponents: the two warpgroups that make dz bring tiles into it by powers of
// two. They have to touch x for that too; both come in parts, two rows at a time, and leave for the
// products in tiles of half their size. Makers go through a tile's parts without waiting for each
// other: its scales are the last tile's, and whether they suit it is seen at its end.
#include "conv_gradients_tf32.cuh"
#include "conv_gradients.h"

namespace braze::cuda {
namespace halo::pooled {
namespace {

// One thread: the barriers' first phases.
__device__ __forceinline__ void init(Barriers& barriers) {
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) {  // of those that count warps, a lane of each arrives
    mbarrier_init(&barriers.made[s], kMakerThreads / 32);
    mbarrier_init(&barriers.empty[s], (1 + kInputs) * 4);
  }
#pragma unroll 1
  for (int s = 0; s < kMostSlots; ++s) {
    mbarrier_init(&barriers.full[s], 1);
    mbarrier_init(&barriers.free[s], kMakerThreads / 32);
  }
  mbarrier_init(&barriers.full[kMostSlots], 1);
  mbarrier_init_fence();
}

// The largest of the weights that a thread looks at, see more().
__device__ __forceinline__ int largest_weight(const float* w, int count) {
  int most = kZeroMost;
#pragma unroll 4
  for (int i = threadIdx.x * 4; i < count; i += kThreads * 4) {
    most = more(most, *reinterpret_cast<const float4*>(w + i));
  }
  return most;
}

// One thread has all parts copied, each as soon as a slot is free.
struct Copier {
  Turn slot;
  int tile = blockIdx.x, number = 0;  // of the next part

  __device__ __forceinline__ void copy(int parts, Barriers& barriers, unsigned char* slots,
                                       const Sources& from, const PlanTF32& p) {
#pragma unroll 1
    for (int i = 0; i < parts && tile < p.tiles; ++i, slot.next()) {
      const Tile t = tile_at(p, tile);
      mbarrier_wait(&barriers.free[slot.place], slot.phase ^ 1);
      copy_part(&barriers.full[slot.place], slots + slot.place * p.part_bytes,
                part_at(p, t, number), from, p);
      if (++number == t.window_rows) {
        number = 0;
        tile += gridDim.x;
      }
    }
  }
};

// The input's gradient from the sums of multiply_positions times 2^exponent. to: of the tile's
// first pixel. Eight lanes of a warp have a position's channels, which is a sector of memory.
__device__ __forceinline__ void store_positions(float (&acc)[kPositions / 2], int exponent,
                                                const Plan& p, int rows, int first, float* to) {
  const int lane = threadIdx.x % 32, c = threadIdx.x / 32 % 4 * 8 + lane / 4;
  const int pitch = p.pitch.divisor(), by = in_range(exponent);
  if (by != exponent) {  // hardly ever
#pragma unroll
    for (float& v : acc) v *= power_of_two(in_range(exponent - by));
  }
  const float factor = power_of_two(by);
  int column;
  int row = p.pitch.div(first + lane % 4 * 2, column);
  to += (row * p.w + column) * p.channels + c;
  if (c >= p.channels) rows = 0;
  const int step = 8 * p.channels, back = (pitch - p.w) * p.channels;
  const int next = p.channels, next_row = p.channels - back;
  int ends = row < rows ? p.w : 0;  // before which columns of this row are results
#pragma unroll
  for (int b = 0; b < kPositions / 8; ++b) {
    const float2 pair = gradients_at(acc, b);
    // The second one may be the first of the next row.
    const bool wraps = column + 1 == pitch;
    bool second = wraps ? row + 1 < rows : column + 1 < ends;
    if (b + 1 == kPositions / 8) second = second && lane % 4 < 3;
    if (column < ends) *to = pair.x * factor;
    if (second) to[wraps ? next_row : next] = pair.y * factor;
    column += 8;
    to += step;
    if (column >= pitch) {
      column -= pitch;
      to -= back;
      ends = ++row < rows ? p.w : 0;
    }
  }
}

template <bool kOnce>
__global__ void __launch_bounds__(kThreads, 1)
    conv_gradients_tf32_kernel(const __grid_constant__ PlanTF32 plan, const Sources sources,
                               const float* w, const GradPartial<float>* sums, int sum_parts,
                               BackwardArgs args, float* __restrict__ dx,
                               float* __restrict__ partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* stages = shared_bytes + (-shared_address(shared_bytes) & 1023);
  unsigned char* weights = stages + kStages * plan.stage_bytes;
  unsigned char* slots = weights + kWeightTiles * kWeightTile;
  __shared__ Barriers barriers;
  __shared__ BackwardCoefficients<float> coefficients[kFilters];
  __shared__ Maxima maxima;
  __shared__ int weight_maximum;
  __shared__ int exponents[kStages][2];  // of a tile's dz, x
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = __shfl_sync(~0u, warp / 4, 0);  // in a uniform register, as descriptors must be
  const int step = gridDim.x, first_tile = blockIdx.x;
  const int maker = static_cast<int>(threadIdx.x) - (1 + kInputs) * 128;  // below 0: none

  if (threadIdx.x == 0) {
    init(barriers);
    maxima = {};
    weight_maximum = 0;
  }
  zero_fill(stages, kStages * plan.stage_bytes);
  fence_async_proxy();
  __syncthreads();
  if (!plan.early) wait_for_earlier_kernels();
  Copier copier{{plan.slots}};
  if (maker == kMakerThreads) copier.copy(plan.slots, barriers, slots, sources, plan);
  __syncwarp();
  const int most_weight = __reduce_max_sync(
      ~0u, largest_weight(w, kFilters * kFilterRows * kTapColumns * plan.channels));
  if (lane == 0) atomicMax(&weight_maximum, most_weight);
  __syncthreads();
  Scale weight_scale;
  weight_scale.choose(magnitude(weight_maximum));
  load_weights(weights, plan.channels, [&](int i) {
    const float factor = power_of_two(weight_scale.exponent);
    const uint2 low = pack_scaled(*reinterpret_cast<const float4*>(w + i), factor);
    const uint2 high = pack_scaled(*reinterpret_cast<const float4*>(w + i + 4), factor);
    return uint4{low.x, low.y, high.x, high.y};
  });
  wait_for_earlier_kernels();
  merge_coefficients(coefficients, args, sums, sum_parts, plan.count);
  fence_async_proxy();
  __syncthreads();

  Turn turn{kStages};
  if (group > kInputs) {
    set_registers<kFirstRegisters, kMakerRegisters>();
    if (maker >= kMakerThreads) {
      if (lane == 0) copier.copy(INT_MAX, barriers, slots, sources, plan);
      return;
    }
    const Coefficients k(coefficients + maker % kVectors * kVector);
    int maxima_turn = 0;
    const int pitch = plan.pitch.divisor();
    Turn slot{plan.slots};
    const Place at(plan, maker, 0);
    uint32_t anew = 0;  // the phase of parts of tiles that are made once more
    Scales scales;
    const auto choose = [&](int2 most) {
      most = merge_maxima(most, maxima, maxima_turn, maker);
      return float2{magnitude(most.x), magnitude(most.y)};
    };
    mbarrier_wait(&barriers.full[0], 0);
    scales.choose(
        choose(sample(slots, plan, part_at(plan, tile_at(plan, first_tile), 0), k, maker)));
    for (int tile = first_tile; tile < plan.tiles; tile += step, turn.next()) {
      unsigned char* const stage = stages + turn.place * plan.stage_bytes;
      const Tile t = tile_at(plan, tile);
      // Of the first part: its first row in the tile; and how many rows are made from there on.
      const int top = 2 * t.window_row - t.first_row + 1;
      const int rows = min(t.rows + 1, plan.h - t.first_row) + 1 - top;
      mbarrier_wait(&barriers.empty[turn.place], turn.phase ^ 1);
      zero_rows(stage, plan, t, maker);
      Tops tops;
      const auto each = [&](const unsigned char* from, int i, const auto& dz, const auto& x) {
        each_operand<kOnce>(from, -top - 2 * i, rows - 1 - 2 * i, i < t.pooled_rows, plan, at, k,
                            maker, dz, x);
      };
      const auto make = [&](const unsigned char* from, int i) {
        const int row = (top + 2 * i) * pitch;
        unsigned char* const to_dz = stage + row * kDzRowBytes;
        unsigned char* const to_x = stage + plan.x_offset + row * kXRowBytes;
        const auto write = [](unsigned char* to, const float4& v, int exponent, __half2& top) {
          const uint2 operands = pack_scaled(v, power_of_two(exponent));
          raise(top, operands);
          *reinterpret_cast<uint2*>(to) = operands;
        };
        each(
            from, i,
            [&](int at, const float4& v) { write(to_dz + at, v, scales.dz.exponent, tops.dz); },
            [&](int at, const float4& v) { write(to_x + at, v, scales.x.exponent, tops.x); });
      };
#pragma unroll 1
      for (int i = 0; i < t.window_rows; ++i, slot.next()) {
        mbarrier_wait(&barriers.full[slot.place], slot.phase);
        make(slots + slot.place * plan.part_bytes, i);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&barriers.free[slot.place]);
      }
      const int2 largest =
          merge_maxima({bits_of(tops.dz), bits_of(tops.x)}, maxima, maxima_turn, maker);
      if (!looks_well(largest.x) || !looks_well(largest.y)) {
        // Perhaps once more, with scales that suit what its values are found to be.
        unsigned char* const from = slots + plan.slots * plan.part_bytes;
        const auto again = [&](const auto& f) {
#pragma unroll 1
          for (int i = 0; i < t.window_rows; ++i, anew ^= 1) {
            named_barrier(kMakerBarrier, kMakerThreads);  // all have left the part before
            if (maker == 0) {
              copy_part(&barriers.full[kMostSlots], from, part_at(plan, t, i), sources, plan);
            }
            mbarrier_wait(&barriers.full[kMostSlots], anew);
            f(i);
          }
        };
        int2 most{kZeroMost, kZeroMost};
        again([&](int i) {
          each(
              from, i, [&](int, const float4& v) { most.x = more(most.x, v); },
              [&](int, const float4& v) { most.y = more(most.y, v); });
        });
        if (!scales.suit(choose(most))) again([&](int i) { make(from, i); });
      }
      if (maker == 0) {
        exponents[turn.place][0] = scales.dz.exponent;
        exponents[turn.place][1] = scales.x.exponent;
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&barriers.made[turn.place]);
    }
  } else if (group > 0) {
    set_registers<kFirstRegisters, kInputRegisters>();
    for (int tile = first_tile; tile < plan.tiles; tile += step, turn.next()) {
      const uint32_t stage = shared_address(stages) + turn.place * plan.stage_bytes;
      const Tile place = tile_at(plan, tile);
      const int64_t pixel = (int64_t{place.image} * plan.h + place.first_row) * plan.w;
      mbarrier_wait(&barriers.made[turn.place], turn.phase);
      const int exponent = -(exponents[turn.place][0] + weight_scale.exponent);
      for (int chunk = group - 1; chunk < plan.chunks; chunk += kInputs) {
        float acc[kPositions / 2];
        const int first = chunk * kResults;
        wgmma_touch(acc);
        multiply_positions<__half>(acc, stage, shared_address(weights), plan, first);
        wgmma_wait<0>();
        wgmma_touch(acc);
        // The last sums leave while the next tile is made.
        if (chunk + kInputs >= plan.chunks && lane == 0) {
          mbarrier_arrive(&barriers.empty[turn.place]);
        }
        store_positions(acc, exponent, plan, place.rows, first, dx + pixel * plan.channels);
      }
      if (group - 1 >= plan.chunks && lane == 0) mbarrier_arrive(&barriers.empty[turn.place]);
    }
  } else {
    set_registers<kFirstRegisters, kWeightRegisters>();
    float acc[kFilterRows][kTapColumns * kChannels / 2];
#pragma unroll
    for (auto& row : acc) {
#pragma unroll
      for (float& sum : row) sum = 0;
    }
    int exponent = 0;  // that the sums so far are scaled by
    for (int tile = first_tile; tile < plan.tiles; tile += step, turn.next()) {
      const uint32_t dz = shared_address(stages) + turn.place * plan.stage_bytes;
      mbarrier_wait(&barriers.made[turn.place], turn.phase);
      const int next = exponents[turn.place][0] + exponents[turn.place][1];
      // Zeros at first, whatever by. Not only where it is to be: a branch would have products wait
      // for each other.
      const float by = power_of_two(in_range(next - exponent));
#pragma unroll
      for (auto& row : acc) {
#pragma unroll
        for (float& sum : row) sum *= by;
      }
      exponent = next;
#pragma unroll
      for (auto& row : acc) wgmma_touch(row);
      multiply_rows<__half>(acc, dz, dz + plan.x_offset, plan);
      wgmma_wait<0>();
#pragma unroll
      for (auto& row : acc) wgmma_touch(row);
      if (lane == 0) mbarrier_arrive(&barriers.empty[turn.place]);
    }
#pragma unroll
    for (int r = 0; r < kFilterRows; ++r) {
#pragma unroll
      for (float& sum : acc[r]) sum = scale_by(sum, -exponent);
      store_partial(acc[r], r, kFilterRows, partial);
    }
  }
#endif
}

// Sets the sizes that follow from rows of a tile; false where so many do not fit.
bool set_tile(PlanTF32& p, int images, int rows) {
  constexpr int kLimit =
      226 * 1024 - int{sizeof(Barriers)} - kFilters * int{sizeof(BackwardCoefficients<float>)};
  constexpr int kFewestSlots = 3;
  const int x_end = set_rows(p, images, rows);
  if (x_end == 0) return false;
  p.stage_bytes = aligned(x_end);
  p.x_part = 2 * p.w * kFilters * 4;
  p.dy_part = p.x_part + 2 * p.w * p.channels * 4;
  p.codes_part = p.dy_part + p.w / 2 * kFilters * 4;
  p.part_bytes = (p.codes_part + p.w / 2 * kFilters / 2 + 127) / 128 * 128;
  const int fixed = 1024 + kStages * p.stage_bytes + kWeightTiles * kWeightTile;
  p.slots = std::min(kMostSlots, (kLimit - fixed) / p.part_bytes - 1);
  p.shared_bytes = fixed + (p.slots + 1) * p.part_bytes;
  p.rounds = static_cast<int>(
      std::max(ceil_div(p.windows.divisor(), Place::kWindows), ceil_div(p.w, Place::kColumns)));
  return fixed < kLimit && p.slots >= kFewestSlots;
}

bool make_plan(const ConvBnPoolBackward& problem, PlanTF32& p) {
  p = {};
  p.count = problem.pool.norm().count();
  return find_rows(problem.conv, p,
                   [&](int images, int rows) { return set_tile(p, images, rows); });
}

const KernelEntry kEntry(
    {"conv_bn_relu2d", "conv_gradients_tf32", "float32", "sm_90a", true,
     "conv_gradients in TF32: fp32 operands as scaled fp16, which has its mantissa"});

}  // namespace

int conv_gradients_tf32_tiles(const ConvBnPoolBackward& problem) {
  PlanTF32 plan;
  const bool takes = problem.conv.dtype == DType::kFloat32 && problem.conv.allow_tf32 &&
                     !problem.pool.turned && takes_backward(problem);
  return takes && make_plan(problem, plan) ? plan.tiles : 0;
}

void conv_gradients_tf32(Stream stream, const ConvBnPoolBackward& problem, const Launch& with) {
  PlanTF32 plan;
  make_plan(problem, plan);
  plan.early = with.early;
  const auto kernel =
      plan.rounds == 1 ? conv_gradients_tf32_kernel<true> : conv_gradients_tf32_kernel<false>;
  const auto of = [](const void* p) { return static_cast<const float*>(p); };
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  const Sources sources{of(problem.z), of(problem.x.data), of(problem.dy), problem.codes};
  launch_early(kernel, std::min(plan.tiles, sm_count()), kThreads, plan.shared_bytes, stream, plan,
               sources, of(problem.w.data), with.sums, with.sum_parts, backward_args(problem),
               static_cast<float*>(problem.dx), with.weight_parts);
}

}  // namespace halo::pooled
}  // namespace braze::cuda
