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
#include <cuda_bf16.h>

#include "split.cuh"
#include "tiles.cuh"
#include "wgrad_sum.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/wgmma.cuh"

namespace braze::cuda::halo {
namespace {

constexpr int kMaxFilterRows = 3;
constexpr int kMaxPixels = 256;

struct WgradPlan {
  Args args;
  int row_bytes, stage_bytes, dy_bytes, steps;  // steps: of 16 positions
  int x_bytes;                                  // fp32: a plane of parts of x; dy_bytes: of dy
  int raw_dy_bytes;                             // fp32: 32 of the 64 filters as loaded
  int shared_bytes;
  dim3 grid;
};

template <typename T, int kChannelBlock>
__global__ void __launch_bounds__(kMaxFilterRows * 128 + 32, 1)
    wgrad_kernel(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap dy_map, const Args a, int stage_bytes,
                 int dy_bytes, int steps, float* __restrict__ partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  constexpr int kRowBytes = kChannelBlock * int{sizeof(T)};
  constexpr int kColumns = kTapColumns * kChannelBlock;
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* shared = shared_bytes + (-shared_address(shared_bytes) & 1023);
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel_blocks = (a.c + kChannelBlock - 1) / kChannelBlock;
  const int k0 = blockIdx.y / channel_blocks * kFilters;
  const int c0 = blockIdx.y % channel_blocks * kChannelBlock;

  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], a.r);
    }
    mbarrier_init_fence();
    prefetch_tensor_map(&x_map);
    prefetch_tensor_map(&dy_map);
  }
  const int used =
      min(a.stages, (a.tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x));
  for (int i = threadIdx.x * 16; i < used * stage_bytes; i += blockDim.x * 16) {
    *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
  }
  fence_async_proxy();
  __syncthreads();
  wait_for_earlier_kernels();

  if (warp == a.r * 4) {
    if (lane != 0) return;
    const int dy_rows = a.tile_images > 1 ? a.image_rows * a.tile_images : a.tile_rows;
    const uint32_t bytes = dy_rows * a.pitch * kFilters * sizeof(T) +
                           a.load_rows * a.tile_images * a.pitch * kRowBytes;
    for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
      const int stage = j % a.stages;
      if (j >= a.stages) mbarrier_wait(&empty[stage], (j / a.stages - 1) & 1);
      mbarrier_expect(&full[stage], bytes);
      const int image = tile / a.row_tiles * a.tile_images;
      const int row = tile % a.row_tiles * a.tile_rows;
      const uint32_t to = shared_address(shared + stage * stage_bytes);
      tma_load_4d(&dy_map, &full[stage], to, k0, 0, row, image);
      tma_load_4d(&x_map, &full[stage], to + dy_bytes, c0, -a.pad_l, row - a.pad_t, image);
    }
    return;
  }

  const int r = __shfl_sync(~0u, warp / 4, 0);  // in a uniform register, as descriptors must be
  float acc[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) acc[i] = 0;
  for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
    const int stage = j % a.stages;
    mbarrier_wait(&full[stage], (j / a.stages) & 1);
    const uint32_t base = shared_address(shared + stage * stage_bytes);
    const uint64_t dy_desc = wgmma_descriptor<kFilters* int{sizeof(T)}>(base);
    const uint64_t x_desc =
        wgmma_descriptor<kRowBytes>(base + dy_bytes + r * a.pitch * kRowBytes, kRowBytes);
    wgmma_touch(acc);
    for (int step = 0; step < steps; ++step) {
      wgmma_fence();
      Wgmma<T, kColumns>::template run<1, 1>(
          acc, wgmma_advance(dy_desc, step * 16 * kFilters * int{sizeof(T)}),
          wgmma_advance(x_desc, step * 16 * kRowBytes), 1);
      wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_touch(acc);
    named_barrier(1 + r, 128);
    if (threadIdx.x % 128 == 0) mbarrier_arrive(&empty[stage]);
  }
  store_partial(acc, r, a.r, partial);
#endif
}

// One sum of a tile on CUDA cores, from the parts in shared memory. Only true outputs count: beside
// them lie zeros of dy, which must not meet an infinity.
template <int kParts>
__device__ __noinline__ float plain_wgrad(const Args& a, const unsigned char* dy, int dy_bytes,
                                          const unsigned char* x, int x_bytes, int rows_left,
                                          int images_left, int shift, int filter, int c) {
  float sum = 0;
  for (int row = 0; row < a.image_rows * a.tile_images; ++row) {
    const int image = row / a.image_rows, p = row - image * a.image_rows;
    if (image >= images_left) break;
    if (p >= rows_left) {
      if (a.tile_images == 1) break;
      continue;
    }
    for (int column = 0; column < a.q; ++column) {
      const int position = row * a.pitch + column;
      sum += unsplit<kParts, 128>(dy, dy_bytes, position, filter) *
             unsplit<kParts, 64>(x, x_bytes, position + shift, c);
    }
  }
  return sum;
}

template <int kParts>
__global__ void __launch_bounds__(kMaxFilterRows * 128 + 32, 1)
    split_wgrad_kernel(const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap dy_map, const __grid_constant__ Args a,
                       const WgradPlan plan, float* __restrict__ partial) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  constexpr int kChannelBlock = 32, kColumns = kTapColumns * kChannelBlock;
  using Pairs = PartPairs<kParts>;
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* shared = shared_bytes + (-shared_address(shared_bytes) & 1023);
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ int special[4];  // of tile j, at j % 4: whether it has infinities or NaN
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, consumers = a.r * 128;
  const int channel_blocks = (a.c + kChannelBlock - 1) / kChannelBlock;
  const int k0 = blockIdx.y / channel_blocks * kFilters;
  const int c0 = blockIdx.y % channel_blocks * kChannelBlock;
  const int part_bytes = kParts * (plan.dy_bytes + plan.x_bytes);  // a tile's operands
  unsigned char* operands = shared + a.stages * plan.stage_bytes;

  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], 1);
    }
    mbarrier_init_fence();
    prefetch_tensor_map(&x_map);
    prefetch_tensor_map(&dy_map);
  }
  if (threadIdx.x < 4) special[threadIdx.x] = 0;
  for (int i = threadIdx.x * 16; i < 2 * part_bytes; i += blockDim.x * 16) {
    *reinterpret_cast<uint4*>(operands + i) = uint4{0, 0, 0, 0};
  }
  fence_async_proxy();
  __syncthreads();
  wait_for_earlier_kernels();

  const int dy_rows = a.tile_images > 1 ? a.image_rows * a.tile_images : a.tile_rows;
  const int dy_positions = dy_rows * a.pitch;
  const int x_positions = a.load_rows * a.tile_images * a.pitch;
  const int tiles = (a.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                    static_cast<int>(gridDim.x);  // of this block
  if (warp == a.r * 4) {
    if (lane != 0) return;
    for (int j = 0; j < tiles; ++j) {
      const int stage = j % a.stages, tile = blockIdx.x + j * gridDim.x;
      if (j >= a.stages) mbarrier_wait(&empty[stage], (j / a.stages - 1) & 1);
      mbarrier_expect(&full[stage], (2 * dy_positions + x_positions) * 128);
      const int image = tile / a.row_tiles * a.tile_images;
      const int row = tile % a.row_tiles * a.tile_rows;
      const uint32_t to = shared_address(shared + stage * plan.stage_bytes);
      tma_load_4d(&dy_map, &full[stage], to, k0, 0, row, image);
      tma_load_4d(&dy_map, &full[stage], to + plan.raw_dy_bytes, k0 + 32, 0, row, image);
      tma_load_4d(&x_map, &full[stage], to + 2 * plan.raw_dy_bytes, c0, -a.pad_l, row - a.pad_t,
                  image);
    }
    return;
  }

  const int r = __shfl_sync(~0u, warp / 4, 0);  // in a uniform register, as descriptors must be
  const int filter = warp % 4 * 16 + lane / 4;
  float acc[kColumns / 2], tile_sum[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) acc[i] = 0;
  const auto split_tile = [&](int j) {
    const int stage = j % a.stages;
    mbarrier_wait(&full[stage], (j / a.stages) & 1);
    const unsigned char* raw = shared + stage * plan.stage_bytes;
    unsigned char* dy = operands + j % 2 * part_bytes;
    const bool dy_special = split_rows<kParts, 128>(raw, plan.raw_dy_bytes, dy, plan.dy_bytes,
                                                    dy_positions, threadIdx.x, consumers);
    const bool x_special =
        split_rows<kParts, 64>(raw + 2 * plan.raw_dy_bytes, 0, dy + kParts * plan.dy_bytes,
                               plan.x_bytes, x_positions, threadIdx.x, consumers);
    if (dy_special || x_special) special[j % 4] = 1;
    fence_async_proxy();
  };

  split_tile(0);
  named_barrier(1, consumers);
  if (threadIdx.x == 0) mbarrier_arrive(&empty[0]);
  for (int j = 0; j < tiles; ++j) {
    const unsigned char* dy = operands + j % 2 * part_bytes;
    const unsigned char* x = dy + kParts * plan.dy_bytes;
    const bool plain = special[j % 4];
    if (!plain) {
      const uint64_t dy_desc = wgmma_descriptor<128>(shared_address(dy));
      const uint64_t x_desc = wgmma_descriptor<64>(shared_address(x) + r * a.pitch * 64, 64);
      wgmma_touch(tile_sum);
      wgmma_fence();
      for (int step = 0; step < plan.steps; ++step) {
#pragma unroll
        for (int pair = 0; pair < Pairs::kCount; ++pair) {
          Wgmma<__nv_bfloat16, kColumns>::template run<1, 1>(
              tile_sum,
              wgmma_advance(dy_desc, Pairs::first(pair) * plan.dy_bytes + step * 16 * 128),
              wgmma_advance(x_desc, Pairs::second(pair) * plan.x_bytes + step * 16 * 64),
              step + pair > 0);
        }
      }
      wgmma_commit();
    }
    if (j + 1 < tiles) split_tile(j + 1);
    wgmma_wait<0>();
    wgmma_touch(tile_sum);
    if (plain) {
      const int tile = blockIdx.x + j * gridDim.x;
      const int rows_left = min(a.tile_rows, a.p - tile % a.row_tiles * a.tile_rows);
      const int images_left = a.images - tile / a.row_tiles * a.tile_images;
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        tile_sum[i] = plain_wgrad<kParts>(a, dy, plan.dy_bytes, x, plan.x_bytes, rows_left,
                                          images_left, r * a.pitch + column / kChannelBlock,
                                          filter + i / 2 % 2 * 8, column % kChannelBlock);
      }
    }
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[i] += tile_sum[i];
    named_barrier(1, consumers);  // this tile's operands are free, the next one's are ready
    if (threadIdx.x == 0) {
      if (j + 1 < tiles) mbarrier_arrive(&empty[(j + 1) % a.stages]);
      special[(j + 3) % 4] = 0;  // of the tile before this one
    }
  }
  store_partial(acc, r, a.r, partial);
#endif
}

// Shared memory past the last tile. The tap columns of an x operand overlap, one position apart;
// compute-sanitizer takes them to lie side by side, and would report reads past the end.
template <int kChannelBlock>
constexpr int kSlack = aligned(16 * (kTapColumns - 1) * kChannelBlock * 2);

// fp32: tiles of at most `pixels` positions; false where one does not fit.
bool tile_parts(const Conv2dShape& s, int pixels, WgradPlan& plan) {
  Args& a = plan.args;
  plan.row_bytes = 128;  // of raw x: 32 channels
  if (!set_tiles(a, static_cast<int>(s.w), static_cast<int>(s.h), pixels, plan.row_bytes)) {
    return false;
  }
  const int parts = s.allow_tf32 ? 2 : 3;
  const int rows = a.tile_images > 1 ? a.image_rows * a.tile_images : a.tile_rows;
  plan.steps = (rows * a.pitch + 15) / 16;
  a.plane_rows = std::max(a.plane_rows, plan.steps * 16 + (a.r - 1) * a.pitch + a.s - 1);
  plan.dy_bytes = aligned(plan.steps * 16 * kFilters * 2);
  plan.x_bytes = aligned(a.plane_rows * 64);
  plan.raw_dy_bytes = aligned(rows * a.pitch * 128);
  plan.stage_bytes = 2 * plan.raw_dy_bytes + aligned(a.load_rows * a.tile_images * a.pitch * 128);
  const int fixed = 1024 + kSlack<32> + 2 * parts * (plan.dy_bytes + plan.x_bytes);
  a.stages = std::min(2, (kSharedBytes - fixed) / plan.stage_bytes);
  plan.shared_bytes = fixed + a.stages * plan.stage_bytes;
  return fixed < kSharedBytes && a.stages >= 1;
}

// One wave of blocks. A batch that one wave takes without a second tile is given a third of the
// device instead: dgrad runs beside it, which the rest of a backward pass waits for, and there
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
  a.r = static_cast<int>(s.r), a.s = static_cast<int>(s.s), a.images = static_cast<int>(s.n);
  a.p = static_cast<int>(s.p), a.q = static_cast<int>(s.q);
  a.pad_t = static_cast<int>(s.pad_h), a.pad_l = static_cast<int>(s.pad_w);
  if (s.dtype == DType::kFloat32) {
    if (!tile_parts(s, 224, plan) && !tile_parts(s, 112, plan) && !tile_parts(s, 64, plan)) {
      return false;
    }
    set_grid(plan, 4);
    return true;
  }
  plan.row_bytes = a.c * 2 % 128 == 0 ? 128 : 64;
  if (!set_tiles(a, static_cast<int>(s.w), static_cast<int>(s.h), kMaxPixels, plan.row_bytes)) {
    return false;
  }
  const int rows = a.tile_images > 1 ? a.image_rows * a.tile_images : a.tile_rows;
  plan.steps = (rows * a.pitch + 15) / 16;
  // The last step may read up to 15 positions past the tile: zeros in dy.
  plan.dy_bytes = aligned(plan.steps * 16 * kFilters * 2);
  a.plane_rows = std::max(a.plane_rows, plan.steps * 16 + (a.r - 1) * a.pitch + a.s - 1);
  plan.stage_bytes = plan.dy_bytes + aligned(a.plane_rows * plan.row_bytes);
  const int fixed = 1024 + kSlack<64>;
  a.stages = std::min({kMaxStages, (kSharedBytes - fixed) / plan.stage_bytes});
  plan.shared_bytes = fixed + a.stages * plan.stage_bytes;
  set_grid(plan, 2);
  return a.stages >= 2;
}

template <typename T>
void launch_reduce(Stream stream, const WgradPlan& plan, const float* partial, void* dw) {
  const Args& a = plan.args;
  const int channel_block = plan.row_bytes / static_cast<int>(sizeof(T));
  const dim3 grid(a.r * kTapColumns * channel_block / 8 * 128 / 32, plan.grid.y);
  launch_early(reduce_kernel<T>, grid, 256, 0, stream, a, channel_block,
               static_cast<int>(plan.grid.x), partial, static_cast<T*>(dw));
  check_launch("conv2d halo_wgmma wgrad reduce");
}

template <int kParts>
void launch_parts(Stream stream, const WgradPlan& plan, const CUtensorMap& x_map,
                  const CUtensorMap& dy_map, void* dw, float* partial) {
  const auto kernel = split_wgrad_kernel<kParts>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  launch_early(kernel, plan.grid, plan.args.r * 128 + 32, plan.shared_bytes, stream, x_map, dy_map,
               plan.args, plan, partial);
  check_launch("conv2d halo_wgmma wgrad");
  launch_reduce<float>(stream, plan, partial, dw);
}

template <typename T>
void launch(Stream stream, const WgradPlan& plan, const CUtensorMap& x_map,
            const CUtensorMap& dy_map, void* dw, float* partial) {
  const Args& a = plan.args;
  const auto kernel = plan.row_bytes == 128 ? wgrad_kernel<T, 64> : wgrad_kernel<T, 32>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  launch_early(kernel, plan.grid, a.r * 128 + 32, plan.shared_bytes, stream, x_map, dy_map, a,
               plan.stage_bytes, plan.dy_bytes, plan.steps, partial);
  check_launch("conv2d halo_wgmma wgrad");
  launch_reduce<T>(stream, plan, partial, dw);
}

}  // namespace

bool supports_wgrad(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  WgradPlan plan;
  return s.dtype != DType::kFloat64 && s.groups == 1 && s.stride_h == 1 && s.stride_w == 1 &&
         s.dilation_h == 1 && s.dilation_w == 1 && s.pad_h < s.r && s.pad_w < s.s && s.n > 0 &&
         s.s == kTapColumns && s.r <= kMaxFilterRows && tma_takes(s.dtype, args.gathered) &&
         tma_takes(s.dtype, args.other) && has_wgmma() && make_plan(s, plan);
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
      tensor_map(s.dtype, x, a.c, s.w, s.h, a.images,
                 {extent(plan.row_bytes / static_cast<int>(size_of(s.dtype))), extent(a.pitch),
                  extent(a.load_rows), extent(a.tile_images)},
                 plan.row_bytes);
  const int rows = a.tile_images > 1 ? a.image_rows : a.tile_rows;
  const CUtensorMap dy_map = tensor_map(s.dtype, dy, a.k, a.q, a.p, a.images,
                                        {extent(128 / static_cast<int>(size_of(s.dtype))),
                                         extent(a.pitch), extent(rows), extent(a.tile_images)},
                                        128);
  float* partial = static_cast<float*>(workspace);
  void* out = const_cast<void*>(dw.data);
  if (s.dtype == DType::kFloat32) {
    const auto run = s.allow_tf32 ? launch_parts<2> : launch_parts<3>;
    run(stream, plan, x_map, dy_map, out, partial);
  } else if (s.dtype == DType::kBFloat16) {
    launch<__nv_bfloat16>(stream, plan, x_map, dy_map, out, partial);
  } else {
    launch<__half>(stream, plan, x_map, dy_map, out, partial);
  }
}

}  // namespace braze::cuda::halo
