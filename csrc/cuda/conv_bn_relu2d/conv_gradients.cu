// conv_bn_pool_backward.h in 16 bits: both gradients of a 3x3 convolution behind which stand batch
// norm, ReLU and 2x2 max pooling.
//
// A block takes tiles of z, of x, of the pooled gradient and of the codes in turn. Two warpgroups
// turn the next tile's z into dz where it lies, while three multiply: one for the weight's
// gradient, whose sums it keeps in registers over all tiles, two for the input's, in chunks. So dz,
// as large as the largest tensor of the forward pass, is neither written nor read, z is read once
// for it, and the tensor cores have something to do while a chunk is on its way out.
//
// A warpgroup is as good as stopped while its products wait for the tensor cores: what is to run
// beside them has to be another's work. Copies and the making of a tile, each of two thousand
// cycles and more, have to be far ahead. The products take as long as shared memory does to bring
// their operands.
#include "conv_gradients_16bit.cuh"
#include "conv_gradients.h"

namespace braze::cuda {
namespace halo::pooled {
namespace {

constexpr int kCopier = 0;  // the thread that has tiles copied: of the warpgroup that waits most

// One thread: the barriers' first phases.
__device__ __forceinline__ void init(Barriers& barriers) {
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) {  // of those that count warps, a lane of each arrives
    mbarrier_init(&barriers.full[s], 1);
    mbarrier_init(&barriers.made[s], kMakers * 4);
    mbarrier_init(&barriers.empty[s], (1 + kInputs) * 4);
  }
  mbarrier_init_fence();
}

// All threads: zeros for what no copy writes, but products read, behind z and behind x.
__device__ __forceinline__ void zero_behind(unsigned char* stages, const Plan16& p) {
  const int z_bytes = p.loaded() * kDzRowBytes, x_bytes = p.x_offset + p.loaded() * kXRowBytes;
#pragma unroll 1
  for (int s = 0; s < kStages; ++s, stages += p.stage_bytes) {
    zero_fill(stages + z_bytes, p.x_offset - z_bytes);
    zero_fill(stages + x_bytes, p.dy_offset - x_bytes);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    conv_gradients_kernel(const __grid_constant__ CUtensorMap z_map,
                          const __grid_constant__ CUtensorMap x_map,
                          const __grid_constant__ Plan16 plan, const T* w, const T* dy,
                          const uint32_t* codes, const GradPartial<float>* sums, int sum_parts,
                          BackwardArgs args, T* __restrict__ dx, float* __restrict__ partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* stages = shared_bytes + (-shared_address(shared_bytes) & 1023);
  unsigned char* weights = stages + kStages * plan.stage_bytes;
  unsigned char* staged = weights + kWeightTiles * kWeightTile;
  __shared__ Barriers barriers;
  __shared__ BackwardCoefficients<float> coefficients[kFilters];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = __shfl_sync(~0u, warp / 4, 0);  // in a uniform register, as descriptors must be
  const int step = gridDim.x, first_tile = blockIdx.x;

  if (threadIdx.x == kCopier) {
    init(barriers);
    prefetch_tensor_map(&z_map);
    prefetch_tensor_map(&x_map);
  }
  zero_behind(stages, plan);
  fence_async_proxy();
  __syncthreads();
  const auto copy = [&](int stage, int tile) {
    if (tile >= plan.tiles) return;
    copy_tile(&barriers.full[stage], stages + stage * plan.stage_bytes, tile, &z_map, &x_map, dy,
              codes, plan);
  };
  if (!plan.early) wait_for_earlier_kernels();
  if (threadIdx.x == kCopier) {
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) copy(s, first_tile + s * step);
  }
  load_weights(weights, plan.channels,
               [&](int i) { return *reinterpret_cast<const uint4*>(w + i); });
  wait_for_earlier_kernels();

  merge_coefficients(coefficients, args, sums, sum_parts, plan.count);
  __syncthreads();

  // Nothing hides the making of the first tile: all threads do it.
  const Coefficients k(coefficients + threadIdx.x % kVectors * kVector);
  mbarrier_wait(&barriers.full[0], 0);
  make_dz<T>(stages, plan, tile_at(plan, first_tile), k, threadIdx.x, kThreads);
  fence_async_proxy();
  __syncthreads();

  Turn turn{kStages};
  if (group > kInputs) {
    set_registers<kFirstRegisters, kMakerRegisters>();
    if (lane == 0) mbarrier_arrive(&barriers.made[0]);  // as for those that they make alone
    turn.next();
    for (int tile = first_tile + step; tile < plan.tiles; tile += step, turn.next()) {
      mbarrier_wait(&barriers.full[turn.place], turn.phase);
      make_dz<T>(stages + turn.place * plan.stage_bytes, plan, tile_at(plan, tile), k,
                 threadIdx.x - (1 + kInputs) * 128, kMakers * 128);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&barriers.made[turn.place]);
    }
  } else if (group > 0) {
    set_registers<kFirstRegisters, kInputRegisters>();
    for (int tile = first_tile; tile < plan.tiles; tile += step, turn.next()) {
      unsigned char* const stage = stages + turn.place * plan.stage_bytes;
      const Tile place = tile_at(plan, tile);
      const int64_t pixel = (int64_t{place.image} * plan.h + place.first_row) * plan.w;
      mbarrier_wait(&barriers.made[turn.place], turn.phase);
      for (int chunk = group - 1; chunk < plan.chunks; chunk += kInputs) {
        float acc[kPositions / 2];
        const int first = chunk * kResults;
        wgmma_touch(acc);
        multiply_positions<T>(acc, shared_address(stage), shared_address(weights), plan, first);
        wgmma_wait<0>();
        wgmma_touch(acc);
        // There is room for one group's results. The others' go where the pooled gradient was,
        // which the makers need no longer.
        store_positions(acc, group == 1 ? staged : stage + plan.dy_offset, group, plan, place.rows,
                        first, dx + pixel * plan.channels);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&barriers.empty[turn.place]);
    }
  } else {
    set_registers<kFirstRegisters, kWeightRegisters>();
    float acc[kFilterRows][kTapColumns * kChannels / 2];
#pragma unroll
    for (auto& row : acc) {
#pragma unroll
      for (float& sum : row) sum = 0;
    }
    Turn before{kStages};
    for (int tile = first_tile; tile < plan.tiles; tile += step, turn.next()) {
      const uint32_t dz = shared_address(stages) + turn.place * plan.stage_bytes;
      mbarrier_wait(&barriers.full[turn.place], turn.phase);
      mbarrier_wait(&barriers.made[turn.place], turn.phase);
#pragma unroll
      for (auto& row : acc) wgmma_touch(row);
      multiply_rows<T>(acc, dz, dz + plan.x_offset, plan);
      wgmma_wait<0>();
#pragma unroll
      for (auto& row : acc) wgmma_touch(row);
      if (lane == 0) mbarrier_arrive(&barriers.empty[turn.place]);
      // The tile before this one has left its stage, or is about to.
      if (threadIdx.x == kCopier && tile != first_tile &&
          tile + (kStages - 1) * step < plan.tiles) {
        mbarrier_wait(&barriers.empty[before.place], before.phase);
        copy(before.place, tile + (kStages - 1) * step);
      }
      before = turn;
    }
#pragma unroll
    for (int r = 0; r < kFilterRows; ++r) store_partial(acc[r], r, kFilterRows, partial);
  }
#endif
}

// Sets the sizes that follow from rows of a tile; false where so many do not fit.
bool set_tile(Plan16& p, int images, int rows) {
  const int x_end = set_rows(p, images, rows), row_tiles = p.row_tiles.divisor();
  if (x_end == 0 || (row_tiles > 1 && p.turned)) return false;
  const int window_rows = row_tiles > 1 ? rows / 2 + 2 : p.h / 2, windows = window_rows * (p.w / 2);
  p.dy_offset = x_end;
  p.codes_offset = p.dy_offset + windows * kPooledBytes;
  // Behind x, results take the place of what dz has been made of.
  p.stage_bytes =
      aligned(std::max(p.codes_offset + windows * kCodeBytes, p.dy_offset + kStagedBytes));
  p.shared_bytes = 1024 + kStages * p.stage_bytes + kWeightTiles * kWeightTile + kStagedBytes;
  constexpr int kLimit =
      227 * 1024 - int{sizeof(Barriers)} - kFilters * int{sizeof(BackwardCoefficients<float>)};
  return p.shared_bytes <= kLimit;
}

bool make_plan(const ConvBnPoolBackward& problem, Plan16& p) {
  p = {};
  p.turned = problem.pool.turned;
  p.count = problem.pool.norm().count();
  return find_rows(problem.conv, p,
                   [&](int images, int rows) { return set_tile(p, images, rows); });
}

const KernelEntry kEntry(
    {"conv_bn_relu2d", "conv_gradients", "bfloat16 float16", "sm_90a", true,
     "both gradients of a 3 x 3 convolution behind which stand batch norm, ReLU "
     "and 2 x 2 max pooling, from tiles of their own in shared memory"});

template <typename T>
void launch(Stream stream, const ConvBnPoolBackward& problem, const Plan16& plan,
            const Launch& with) {
  const Conv2dShape& s = problem.conv;
  const auto extent = [](int v) { return static_cast<uint32_t>(v); };
  const uint32_t pitch = extent(plan.pitch.divisor()), rows = extent(plan.tile_rows + 2);
  const Tensor4dRef z{problem.z, s.p * s.q * s.k, 1, s.q * s.k, s.k};
  const CUtensorMap z_map =
      tensor_map(s.dtype, z, s.k, s.q, s.p, s.n, {kFilters, pitch, rows, 1}, kDzRowBytes);
  const CUtensorMap x_map =
      tensor_map(s.dtype, problem.x, s.c, s.w, s.h, s.n, {kChannels, pitch, rows, 1}, kXRowBytes);
  const auto kernel = conv_gradients_kernel<T>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  launch_early(kernel, std::min(plan.tiles, sm_count()), kThreads, plan.shared_bytes, stream, z_map,
               x_map, plan, static_cast<const T*>(problem.w.data),
               static_cast<const T*>(problem.dy), problem.codes, with.sums, with.sum_parts,
               backward_args(problem), static_cast<T*>(problem.dx), with.weight_parts);
}

}  // namespace

int conv_gradients_tiles(const ConvBnPoolBackward& problem) {
  Plan16 plan;
  const bool takes = size_of(problem.conv.dtype) == 2 && takes_backward(problem);
  return takes && make_plan(problem, plan) ? plan.tiles : 0;
}

void conv_gradients(Stream stream, const ConvBnPoolBackward& problem, const Launch& with) {
  Plan16 plan;
  make_plan(problem, plan);
  plan.early = with.early;
  const auto run = problem.conv.dtype == DType::kBFloat16 ? launch<__nv_bfloat16> : launch<__half>;
  run(stream, problem, plan, with);
}

}  // namespace halo::pooled
}  // namespace braze::cuda
