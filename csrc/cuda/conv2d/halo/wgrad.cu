// The weight gradient of halo/wgmma.cuh's convolutions, three filter columns.
//
// dW_tap (filters x C) = dY (filters x pixels) X_tap^T (pixels x C): the reduction runs over the
// positions of a tile, and X_tap is again the tile of inputs read from another row on. Both
// operands have their channels, M and N of this product, innermost in shared memory. The three taps
// of a filter row are one operand of 3 C columns: blocks of C columns lie one pixel apart. A
// warpgroup owns a filter row and keeps its gradients in registers over all tiles of its block; a
// second kernel adds up the blocks in a fixed order.
//
// wgmma takes such operands in 16 bits only: fp32 inputs are split into bf16 parts (three at fp32's
// accuracy, two where TF32 is allowed), each tile while the previous one is multiplied.
#include "wgrad.cuh"
#include "cuda/common/launch.cuh"

namespace braze::cuda::halo {
namespace {

template <typename T, int kChannelBlock>
__global__ void __launch_bounds__(kMaxThreads, 1)
    wgrad_kernel(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap dy_map, const WgradPlan plan,
                 float* __restrict__ partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  const Args& a = plan.args;
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* stages = shared_bytes + (-shared_address(shared_bytes) & 1023);
  __shared__ TileRing<1> ring;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const BlockPlace place = place_of_block<kChannelBlock>(a);

  ring.init(a.stages, a.r);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&x_map);
    prefetch_tensor_map(&dy_map);
  }
  const int used =
      min(a.stages, (a.tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x));
  zero_fill(stages, used * plan.stage_bytes);
  fence_async_proxy();
  __syncthreads();
  wait_for_earlier_kernels();

  if (warp == a.r * 4) {
    if (lane != 0) return;
    const Positions copied = copied_positions(a);
    for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
      produce_tile<T, kChannelBlock>(ring, j, tile, &x_map, &dy_map, stages, plan, copied, place);
    }
    return;
  }

  const int r = __shfl_sync(~0u, warp / 4, 0);  // in a uniform register, as descriptors must be
  float acc[kTapColumns * kChannelBlock / 2];
#pragma unroll
  for (float& sum : acc) sum = 0;
  for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
    ring.wait(j, a);
    multiply_stage<T, kChannelBlock>(acc, stages + a.stage_of(j) * plan.stage_bytes, plan, r);
    named_barrier(1 + r, 128);
    if (threadIdx.x % 128 == 0) ring.release(j, a);
  }
  store_partial(acc, r, a.r, partial);
#endif
}

template <int kParts>
__global__ void __launch_bounds__(kMaxThreads, 1)
    split_wgrad_kernel(const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap dy_map,
                       const __grid_constant__ WgradPlan plan, float* __restrict__ partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  constexpr int kAcc = kTapColumns * kPartChannels / 2;
  const Args& a = plan.args;
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* stages = shared_bytes + (-shared_address(shared_bytes) & 1023);
  unsigned char* operands = stages + a.stages * plan.stage_bytes;  // of two tiles in turn
  const int tile_bytes = SplitTile<kParts>::bytes(plan.operands);
  __shared__ TileRing<1> ring;
  __shared__ int special[4];  // of tile j, at j % 4: whether it has infinities or NaN
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, consumers = a.r * 128;
  const BlockPlace place = place_of_block<kPartChannels>(a);

  ring.init(a.stages);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&x_map);
    prefetch_tensor_map(&dy_map);
  }
  if (threadIdx.x < 4) special[threadIdx.x] = 0;
  zero_fill(operands, 2 * tile_bytes);
  fence_async_proxy();
  __syncthreads();
  wait_for_earlier_kernels();

  const Positions copied = copied_positions(a);
  const int tiles = (a.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                    static_cast<int>(gridDim.x);  // of this block
  if (warp == a.r * 4) {
    if (lane != 0) return;
    for (int j = 0; j < tiles; ++j) {
      produce_tile<float, kPartChannels>(ring, j, blockIdx.x + j * gridDim.x, &x_map, &dy_map,
                                         stages, plan, copied, place);
    }
    return;
  }

  const int r = __shfl_sync(~0u, warp / 4, 0);  // in a uniform register, as descriptors must be
  float acc[kAcc], tile_sum[kAcc];
#pragma unroll
  for (float& sum : acc) sum = 0;
  const auto split_tile = [&](int j) {
    ring.wait(j, a);
    if (split_stage<kParts>(stages + a.stage_of(j) * plan.stage_bytes,
                            operands + j % 2 * tile_bytes, plan, copied, consumers)) {
      special[j % 4] = 1;
    }
    fence_async_proxy();
  };

  split_tile(0);
  named_barrier(1, consumers);
  if (threadIdx.x == 0) ring.release(0, a);
  for (int j = 0; j < tiles; ++j) {
    const unsigned char* tile_operands = operands + j % 2 * tile_bytes;
    const bool plain = special[j % 4];
    if (!plain) multiply_parts<kParts>(tile_sum, tile_operands, plan, r);
    if (j + 1 < tiles) split_tile(j + 1);
    wgmma_wait<0>();
    wgmma_touch(tile_sum);
    if (plain) {
      sum_plainly<kParts>(tile_sum, tile_operands, plan, blockIdx.x + j * gridDim.x, r);
    }
#pragma unroll
    for (int i = 0; i < kAcc; ++i) acc[i] += tile_sum[i];
    named_barrier(1, consumers);  // this tile's operands are free, the next one's are ready
    if (threadIdx.x == 0) {
      if (j + 1 < tiles) ring.release(j + 1, a);
      special[(j + 3) % 4] = 0;  // of the tile before this one
    }
  }
  store_partial(acc, r, a.r, partial);
#endif
}

// Shared memory past the last tile. The tap columns of an x operand overlap, one position apart;
// compute-sanitizer takes them to lie side by side, and would report reads past the end.
template <int kChannelBlock>
constexpr int kSlack = aligned(kDepth * (kTapColumns - 1) * kChannelBlock * 2);

// Tiles of at most `pixels` positions, and the sizes that follow; false where one does not fit.
// parts: those of fp32; 0 in 16 bits.
bool tile(const Conv2dShape& s, int pixels, int parts, WgradPlan& plan) {
  Args& a = plan.args;
  a.q = static_cast<int>(s.q), a.images = static_cast<int>(s.n);
  const auto cost = [](const Args& a) {
    const Positions copied = copied_positions(a);
    return int64_t{a.tiles} * (copied.x + 2 * copied.dy);
  };
  if (!cut_into_tiles(a, static_cast<int>(s.w), static_cast<int>(s.h), pixels, plan.row_bytes,
                      cost)) {
    return false;
  }
  const Positions copied = copied_positions(a);
  plan.steps = (copied.dy + kDepth - 1) / kDepth;
  // The last step may read up to 15 positions past the tile: zeros in dy.
  const int summed = plan.steps * kDepth;
  a.plane_rows = std::max(a.plane_rows, summed + (a.r - 1) * a.pitch + a.s - 1);
  plan.operands = {aligned(summed * kDyRowBytes),
                   aligned(a.plane_rows * (parts ? kPartRowBytes : plan.row_bytes))};
  int fixed = 1024, most_stages = kMaxStages, fewest_stages = 2;
  if (parts) {
    plan.loaded = {aligned(copied.dy * kDyRowBytes), aligned(copied.x * plan.row_bytes)};
    plan.stage_bytes = LoadedTile<float>::bytes(plan.loaded);
    const int tile_bytes =
        parts == 2 ? SplitTile<2>::bytes(plan.operands) : SplitTile<3>::bytes(plan.operands);
    fixed += kSlack<kPartChannels> + 2 * tile_bytes;
    // A stage that is split is free again before its products begin: one is enough.
    most_stages = 2, fewest_stages = 1;
  } else {
    plan.loaded = plan.operands;
    plan.stage_bytes = LoadedTile<__nv_bfloat16>::bytes(plan.loaded);
    fixed += kSlack<64>;
  }
  a.stages = std::min(most_stages, (kSharedBytes - fixed) / plan.stage_bytes);
  plan.shared_bytes = fixed + a.stages * plan.stage_bytes;
  a.set_divisors();
  return fixed < kSharedBytes && a.stages >= fewest_stages;
}

// One wave of blocks. A batch that one wave takes without a second tile is given a third of the
// device instead: dgrad runs concurrently, which the rest of a backward pass waits for, and there
// are fewer partial sums.
void set_grid(WgradPlan& plan, int element_bytes) {
  const Args& a = plan.args;
  const int channel_block = plan.row_bytes / element_bytes;
  const int blocks = static_cast<int>(ceil_div(a.k, kFilters) * ceil_div(a.c, channel_block));
  const int wave = std::max(1, sm_count() / blocks);
  plan.grid = dim3(std::min(a.tiles, a.tiles > wave ? wave : std::max(1, wave / 3)), blocks);
}

bool make_plan(const Conv2dShape& s, WgradPlan& plan) {
  plan = {};
  Args& a = plan.args;
  a.c = static_cast<int>(s.c), a.k = static_cast<int>(s.k);
  a.r = static_cast<int>(s.r), a.s = static_cast<int>(s.s), a.p = static_cast<int>(s.p);
  a.pad_t = static_cast<int>(s.pad_h), a.pad_l = static_cast<int>(s.pad_w);
  const int size = static_cast<int>(size_of(s.dtype));
  plan.row_bytes = size == 4 || a.c * size % 128 == 0 ? 128 : 64;
  const int parts = size == 2 ? 0 : s.allow_tf32 ? 2 : 3;
  const bool fits =
      parts ? tile(s, 224, parts, plan) || tile(s, 112, parts, plan) || tile(s, 64, parts, plan)
            : tile(s, kMaxPixels, parts, plan);
  if (fits) set_grid(plan, size);
  return fits;
}

template <typename T>
constexpr auto kernel_for(const WgradPlan& plan) {
  return plan.row_bytes == 128 ? wgrad_kernel<T, 64> : wgrad_kernel<T, 32>;
}

template <typename T>
void launch(Stream stream, void (*kernel)(CUtensorMap, CUtensorMap, WgradPlan, float*),
            const WgradPlan& plan, const CUtensorMap& x_map, const CUtensorMap& dy_map, void* dw,
            float* partial) {
  const Args& a = plan.args;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  launch_early(kernel, plan.grid, a.r * 128 + 32, plan.shared_bytes, stream, x_map, dy_map, plan,
               partial);
  check_launch("conv2d halo_wgmma wgrad");
  const int channel_block = plan.row_bytes / static_cast<int>(sizeof(T));
  const dim3 grid(a.r * items_of_row(channel_block) / kSumItems, plan.grid.y);
  launch_early(reduce_kernel<T>, grid, kSumThreads, 0, stream, a, channel_block,
               static_cast<int>(plan.grid.x), partial, static_cast<T*>(dw));
  check_launch("conv2d halo_wgmma wgrad reduce");
}

}  // namespace

bool supports_wgrad(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  WgradPlan plan;
  return takes(s) && s.s == kTapColumns && s.r <= kMaxFilterRows &&
         tma_takes(s.dtype, args.gathered) && tma_takes(s.dtype, args.other) && make_plan(s, plan);
}

void plan_wgrad(const Conv2dArgs& args, Conv2dPlan* plan) {
  const Conv2dShape& s = args.shape;
  WgradPlan tiling;
  make_plan(s, tiling);
  const int64_t columns = kTapColumns * tiling.row_bytes / size_of(s.dtype);
  plan->workspace_bytes = int64_t{tiling.grid.x} * tiling.grid.y * s.r * kFilters * columns * 4;
  plan->tiling.set(tiling);
}

void run_wgrad(Stream stream, const Conv2dArgs& args, const Conv2dPlan& planned, void* workspace) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef &x = args.gathered, &dy = args.other, &dw = args.out;
  WgradPlan plan = planned.tiling.get<WgradPlan>();
  Args& a = plan.args;
  a.w_k = dw.n, a.w_c = dw.c, a.w_r = dw.h, a.w_s = dw.w;
  const auto extent = [](int v) { return static_cast<uint32_t>(v); };
  const CUtensorMap x_map =
      tensor_map(s.dtype, x, a.c, s.w, s.h, s.n,
                 {extent(plan.row_bytes / static_cast<int>(size_of(s.dtype))), extent(a.pitch),
                  extent(a.load_rows), extent(a.tile_images)},
                 plan.row_bytes);
  const int rows = a.tile_images > 1 ? a.image_rows : a.tile_rows;
  const CUtensorMap dy_map = stripe_map(s.dtype, dy, a.k, a.q, a.stripes, a.p, s.n,
                                        {extent(128 / static_cast<int>(size_of(s.dtype))),
                                         extent(a.pitch), extent(rows), extent(a.tile_images)},
                                        128);
  float* partial = static_cast<float*>(workspace);
  void* out = const_cast<void*>(dw.data);
  if (s.dtype == DType::kFloat32) {
    const auto kernel = s.allow_tf32 ? split_wgrad_kernel<2> : split_wgrad_kernel<3>;
    launch<float>(stream, kernel, plan, x_map, dy_map, out, partial);
  } else if (s.dtype == DType::kBFloat16) {
    using T = __nv_bfloat16;
    launch<T>(stream, kernel_for<T>(plan), plan, x_map, dy_map, out, partial);
  } else {
    using T = __half;
    launch<T>(stream, kernel_for<T>(plan), plan, x_map, dy_map, out, partial);
  }
}

}  // namespace braze::cuda::halo
