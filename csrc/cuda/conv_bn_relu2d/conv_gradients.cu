// conv_bn_pool_backward.h's kernel: both gradients of a 3x3 convolution behind which stand batch
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
#include "conv_gradients_products.cuh"
#include "bn_pool_sums.h"
#include "launchers/conv_bn_pool_backward.h"

namespace braze::cuda {
namespace halo::pooled {
namespace {

constexpr int kMergeLanes = 8;  // that merge a channel's partial sums
static_assert(kMergeLanes * kFilters <= kThreads);
constexpr int kCopier = 0;  // the thread that has tiles copied: of the warpgroup that waits most

// Registers of a thread; so many threads begin with kFirstRegisters each.
constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;
constexpr int kWeightRegisters = 176, kInputRegisters = 88, kMakerRegisters = 64;
static_assert(kWeightRegisters + kInputs * kInputRegisters + kMakers * kMakerRegisters <=
              (1 + kInputs + kMakers) * kFirstRegisters);

// Called by whole warpgroups: gives up registers, or waits until others have.
template <int kCount>
__device__ __forceinline__ void set_registers() {
  if constexpr (kCount > kFirstRegisters) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }
}

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
__device__ __forceinline__ void zero_behind(unsigned char* stages, const Plan& p) {
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
                          const __grid_constant__ Plan plan, const T* w, const T* dy,
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
  load_weights(weights, w, plan.channels);
  wait_for_earlier_kernels();

  if (threadIdx.x < kMergeLanes * kFilters) {
    const int channel = threadIdx.x / kMergeLanes;
    const BackwardCoefficients<float> merged = merge_grads<float, kMergeLanes>(
        args, sums, sum_parts, plan.count, channel, blockIdx.x == 0);
    if (threadIdx.x % kMergeLanes == 0) coefficients[channel] = merged;
  }
  __syncthreads();

  // Nothing hides the making of the first tile: all threads do it.
  const Coefficients k(coefficients + threadIdx.x % kVectors * kVector);
  mbarrier_wait(&barriers.full[0], 0);
  make_dz<T>(stages, plan, tile_at(plan, first_tile), k, threadIdx.x, kThreads);
  fence_async_proxy();
  __syncthreads();

  Turn turn;
  if (group > kInputs) {
    set_registers<kMakerRegisters>();
    if (lane == 0) mbarrier_arrive(&barriers.made[0]);  // as for those that they make alone
    turn.next();
    for (int tile = first_tile + step; tile < plan.tiles; tile += step, turn.next()) {
      mbarrier_wait(&barriers.full[turn.stage], turn.phase);
      make_dz<T>(stages + turn.stage * plan.stage_bytes, plan, tile_at(plan, tile), k,
                 threadIdx.x - (1 + kInputs) * 128, kMakers * 128);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&barriers.made[turn.stage]);
    }
  } else if (group > 0) {
    set_registers<kInputRegisters>();
    for (int tile = first_tile; tile < plan.tiles; tile += step, turn.next()) {
      unsigned char* const stage = stages + turn.stage * plan.stage_bytes;
      const Tile place = tile_at(plan, tile);
      const int64_t pixel = (int64_t{place.image} * plan.h + place.first_row) * plan.w;
      mbarrier_wait(&barriers.made[turn.stage], turn.phase);
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
      if (lane == 0) mbarrier_arrive(&barriers.empty[turn.stage]);
    }
  } else {
    set_registers<kWeightRegisters>();
    float acc[kFilterRows][kTapColumns * kChannels / 2];
#pragma unroll
    for (auto& row : acc) {
#pragma unroll
      for (float& sum : row) sum = 0;
    }
    Turn before;
    for (int tile = first_tile; tile < plan.tiles; tile += step, turn.next()) {
      const uint32_t dz = shared_address(stages) + turn.stage * plan.stage_bytes;
      mbarrier_wait(&barriers.full[turn.stage], turn.phase);
      mbarrier_wait(&barriers.made[turn.stage], turn.phase);
#pragma unroll
      for (auto& row : acc) wgmma_touch(row);
      multiply_rows<T>(acc, dz, dz + plan.x_offset, plan);
      wgmma_wait<0>();
#pragma unroll
      for (auto& row : acc) wgmma_touch(row);
      if (lane == 0) mbarrier_arrive(&barriers.empty[turn.stage]);
      // The tile before this one has left its stage, or is about to.
      if (threadIdx.x == kCopier && tile != first_tile &&
          tile + (kStages - 1) * step < plan.tiles) {
        mbarrier_wait(&barriers.empty[before.stage], before.phase);
        copy(before.stage, tile + (kStages - 1) * step);
      }
      before = turn;
    }
#pragma unroll
    for (int r = 0; r < kFilterRows; ++r) store_partial(acc[r], r, kFilterRows, partial);
  }
#endif
}

// Sets the sizes that follow from rows of a tile; false where so many do not fit.
bool set_tile(Plan& p, int images, int rows) {
  const int pitch = p.pitch.divisor();
  p.tile_rows = rows;
  const int row_tiles = static_cast<int>(ceil_div(p.h, rows));
  if (int64_t{images} * row_tiles > 1 << 30 || rows + 2 > 256) return false;
  p.row_tiles = FastDiv(row_tiles);
  p.tiles = images * row_tiles;
  p.chunks = static_cast<int>(ceil_div((rows - 1) * pitch + p.w, kResults));
  p.steps = static_cast<int>(ceil_div(rows * pitch, kDepth));
  // Products of the weight's gradient go on to whole steps: there dz has to be zero, which the halo
  // of rows of an image is not, and x finite.
  const int summed = p.steps * kDepth;
  if (row_tiles > 1 && (summed != rows * pitch || rows % 2 > 0 || p.turned)) return false;
  const int window_rows = row_tiles > 1 ? rows / 2 + 2 : p.h / 2, windows = window_rows * (p.w / 2);
  p.x_offset = aligned(std::max(p.loaded(), summed + pitch + 1) * kDzRowBytes);
  p.dy_offset =
      p.x_offset +
      (std::max(p.loaded(), summed + 2 * pitch + kTapColumns - 1) * kXRowBytes + 127) / 128 * 128;
  p.codes_offset = p.dy_offset + windows * kPooledBytes;
  // Behind x, results take the place of what dz has been made of.
  p.stage_bytes =
      aligned(std::max(p.codes_offset + windows * kCodeBytes, p.dy_offset + kStagedBytes));
  p.shared_bytes = 1024 + kStages * p.stage_bytes + kWeightTiles * kWeightTile + kStagedBytes;
  constexpr int kLimit =
      227 * 1024 - int{sizeof(Barriers)} - kFilters * int{sizeof(BackwardCoefficients<float>)};
  return p.shared_bytes <= kLimit;
}

// Whole images, or as many rows as fit.
bool make_plan(const ConvBnPoolBackward& problem, Plan& p) {
  const Conv2dShape& s = problem.conv;
  constexpr int kMostPixels = 1 << 20;
  constexpr int kFewestRows = 4;  // else half of what is read is halo, which was not measured
  if (s.h > kMostPixels || s.w + 2 > 256) return false;
  p = {};
  p.channels = static_cast<int>(s.c), p.h = static_cast<int>(s.h), p.w = static_cast<int>(s.w);
  p.pitch = FastDiv((s.w + 8) / 8 * 8);  // of which any even number of rows makes whole steps
  p.windows = FastDiv((s.w + 1) / 2);
  p.turned = problem.pool.turned;
  p.count = problem.pool.norm().count();
  const int images = static_cast<int>(s.n);
  if (set_tile(p, images, p.h)) return true;
  for (int rows = (p.h - 1) / 2 * 2; rows >= kFewestRows; rows -= 2) {
    if (set_tile(p, images, rows)) return true;
  }
  return false;
}

const KernelEntry kEntry(
    {"conv_bn_relu2d", "conv_gradients", "bfloat16 float16", "sm_90a", true,
     "both gradients of a 3 x 3 convolution behind which stand batch norm, ReLU "
     "and 2 x 2 max pooling, from tiles of their own in shared memory"});

bool is_dense(const Tensor4dRef& t, int64_t c, int64_t h, int64_t w) {
  return t.c == 1 && t.w == c && t.h == w * c && t.n == h * w * c &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

bool takes_backward(const ConvBnPoolBackward& problem, Plan& plan) {
  const Conv2dShape& s = problem.conv;
  const auto aligned_to_16 = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return takes(s) && size_of(s.dtype) == 2 && s.r == 3 && s.s == 3 && s.pad_h == 1 &&
         s.pad_w == 1 && s.k == kFilters && s.c <= kChannels && s.c % 8 == 0 && s.n <= INT_MAX &&
         problem.pool.channels_last && is_dense(problem.x, s.c, s.h, s.w) &&
         is_dense(problem.w, s.c, s.r, s.s) && aligned_to_16(problem.dy) &&
         aligned_to_16(problem.z) && aligned_to_16(problem.codes) && make_plan(problem, plan);
}

// The workspace: partial sums of batch norm's gradients, behind them those of the weight's.
int64_t weight_offset(const ConvBnPoolBackward& problem) {
  return ceil_div(batch_norm_workspace_bytes(problem.pool.norm()), 256) * 256;
}
float* weight_parts(const ConvBnPoolBackward& problem, void* workspace) {
  return reinterpret_cast<float*>(static_cast<char*>(workspace) + weight_offset(problem));
}
int blocks_of(const Plan& plan) { return std::min(plan.tiles, sm_count()); }

template <typename T>
void launch(Stream stream, const ConvBnPoolBackward& problem, Plan plan, void* workspace) {
  const Conv2dShape& s = problem.conv;
  auto* const sums = static_cast<GradPartial<float>*>(workspace);
  const int parts = bn_pool_grad_sums(stream, problem.pool, problem.dy, problem.z, problem.codes,
                                      problem.statistics.mean, sums);
  note_ordering_kernel(stream, {{sums, weight_offset(problem)}});
  const int64_t size = size_of(s.dtype);
  const auto readable = [&](const void* p, int64_t bytes) {
    return may_read_early(stream, {p, bytes});
  };
  const int64_t pooled = problem.pool.pooled();
  plan.early = readable(problem.z, s.n * s.p * s.q * s.k * size) &&
               readable(problem.x.data, s.n * s.h * s.w * s.c * size) &&
               readable(problem.dy, pooled * size) && readable(problem.codes, pooled / 2) &&
               may_read_early(stream, weight_span(s, problem.w));
  const auto extent = [](int v) { return static_cast<uint32_t>(v); };
  const uint32_t pitch = extent(plan.pitch.divisor()), rows = extent(plan.tile_rows + 2);
  const Tensor4dRef z{problem.z, s.p * s.q * s.k, 1, s.q * s.k, s.k};
  const CUtensorMap z_map =
      tensor_map(s.dtype, z, s.k, s.q, s.p, s.n, {kFilters, pitch, rows, 1}, kDzRowBytes);
  const CUtensorMap x_map =
      tensor_map(s.dtype, problem.x, s.c, s.w, s.h, s.n, {kChannels, pitch, rows, 1}, kXRowBytes);
  const BackwardArgs args{problem.affine,
                          problem.statistics,
                          problem.dweight,
                          problem.dbias,
                          problem.dconstant,
                          s.dtype,
                          true,
                          true};
  const auto kernel = conv_gradients_kernel<T>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  launch_early(kernel, blocks_of(plan), kThreads, plan.shared_bytes, stream, z_map, x_map, plan,
               static_cast<const T*>(problem.w.data), static_cast<const T*>(problem.dy),
               problem.codes, sums, parts, args, static_cast<T*>(problem.dx),
               weight_parts(problem, workspace));
  check_launch("conv_bn_relu2d_backward");
}

}  // namespace
}  // namespace halo::pooled

bool conv_bn_pool_backward_pays(const ConvBnPoolBackward& problem) {
  halo::pooled::Plan plan;
  if (!halo::pooled::takes_backward(problem, plan)) return false;
  // Measured on an H200 (bf16, 8 to 32 channels, 7 x 7 to 32 x 32 pixels): with more tiles it was
  // 1.1 to 1.7 times as fast as one pass after the other; a tile for every other multiprocessor
  // takes 1 to 2 us longer.
  return plan.tiles > sm_count() * 3 / 2;
}

int64_t conv_bn_pool_backward_workspace_bytes(const ConvBnPoolBackward& problem) {
  using namespace halo;
  pooled::Plan plan;
  pooled::make_plan(problem, plan);
  constexpr int64_t kPart = pooled::kFilterRows * kFilters * kTapColumns * pooled::kChannels;
  return pooled::weight_offset(problem) + pooled::blocks_of(plan) * kPart * sizeof(float);
}

void conv_bn_pool_backward(Stream stream, const ConvBnPoolBackward& problem, void* workspace) {
  halo::pooled::Plan plan;
  halo::pooled::make_plan(problem, plan);
  const auto launch = problem.conv.dtype == DType::kBFloat16 ? halo::pooled::launch<__nv_bfloat16>
                                                             : halo::pooled::launch<__half>;
  launch(stream, problem, plan, workspace);
}

void finish_conv_bn_pool_backward(Stream stream, const ConvBnPoolBackward& problem,
                                  void* workspace) {
  using namespace halo;
  const Conv2dShape& s = problem.conv;
  const Tensor4dRef& dw = problem.dw;
  pooled::Plan plan;
  pooled::make_plan(problem, plan);
  Args a{};
  a.c = static_cast<int>(s.c), a.k = static_cast<int>(s.k), a.r = pooled::kFilterRows;
  a.w_k = dw.n, a.w_c = dw.c, a.w_r = dw.h, a.w_s = dw.w;
  const int blocks = a.r * items_of_row(pooled::kChannels) / kSumItems;
  const float* const parts = pooled::weight_parts(problem, workspace);
  void* const out = const_cast<void*>(dw.data);
  const auto launch = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    launch_early(reduce_kernel<T>, blocks, kSumThreads, 0, stream, a, pooled::kChannels,
                 pooled::blocks_of(plan), parts, typed);
  };
  if (s.dtype == DType::kBFloat16) {
    launch(static_cast<__nv_bfloat16*>(out));
  } else {
    launch(static_cast<__half*>(out));
  }
  check_launch("conv_bn_relu2d_backward");
}

}  // namespace braze::cuda
