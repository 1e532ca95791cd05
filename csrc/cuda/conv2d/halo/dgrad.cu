// halo_narrow_dgrad: the input gradient of halo/wgmma.cuh's convolutions for up to 32 channels,
// three filter columns.
//
// There the computed channels are the rows of the accumulator, of which wgmma always computes 64.
// Here positions are: for filter row r, D_s (64 positions x channels) += dY_r (64 x filters)
// W_rs (filters x channels) for the three columns s side by side, 96 columns of one product, so
// that nothing is wasted and the tile of dY, read from a row of it on, serves three taps at once.
// The gradient at position p is D_2[p] + D_1[p + 1] + D_0[p + 2]: the shifts that the taps of a row
// differ by are made once, on the sums, by shuffles. The last two of the 64 positions are
// neighbours only.
//
// A warpgroup computes tiles of its own; one's epilogue hides behind the others' products.
#include "dgrad.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/wgmma.cuh"

namespace braze::cuda::halo {
namespace narrow {
namespace {

struct Plan {
  Args args;
  int raw_plane_bytes, stage_bytes;  // as loaded
  int plane_bytes;                   // of operands
  int blocks;                        // of operands
  int shared_bytes;
};

template <typename T, int kPlanes>
__global__ void __launch_bounds__(Traits<T, kPlanes>::kThreads, 1)
    dgrad_kernel(const __grid_constant__ CUtensorMap dy_map,
                 const __grid_constant__ CUtensorMap w_map, const Plan plan, const T* w,
                 T* __restrict__ dx) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // as has_wgmma() asks
  using Tr = Traits<T, kPlanes>;
  using Op = typename Tr::Op;
  const Args& a = plan.args;
  extern __shared__ unsigned char shared_bytes[];
  unsigned char* shared = shared_bytes + (-shared_address(shared_bytes) & 1023);
  __shared__ TileRing<Tr::kGroups> ring;
  __shared__ uint64_t weights_full[kMaxWeightTiles];
  __shared__ alignas(16) float edges[Tr::kEdges];
  // Whether weights have infinities or NaN, or a group's tile; two in turn.
  __shared__ int special_weights, special_tile[Tr::kGroups][2];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = __shfl_sync(~0u, warp / 4, 0), thread = threadIdx.x % 128;
  const int weight_tiles = a.r * plan.blocks;
  unsigned char* stages = shared + weight_tiles * kPlanes * Tr::kWeightTile;
  unsigned char* parts = stages + a.stages * plan.stage_bytes;
  ring.init(a.stages);
  if (threadIdx.x == 0) {
    if (a.copy_weights) {
      for (int i = 0; i < weight_tiles; ++i) mbarrier_init(&weights_full[i], 1);
      mbarrier_init_fence();
      prefetch_tensor_map(&w_map);
    }
    prefetch_tensor_map(&dy_map);
    special_weights = 0;
  }
  if (threadIdx.x < 2 * Tr::kGroups) special_tile[threadIdx.x / 2][threadIdx.x % 2] = 0;
  const int loaded = a.load_rows * a.tile_images * a.pitch;
  unsigned char* operands = kPlanes == 1 ? stages : parts;
  const int planes = plan.blocks * (kPlanes == 1 ? a.stages : Tr::kGroups * kPlanes);
  zero_behind<kRowBytes>(loaded, operands, planes, plan.plane_bytes, Tr::kThreads / 32);
  fence_async_proxy();
  __syncthreads();
  wait_for_earlier_kernels();

  if (warp == Tr::kGroups * 4) {
    if (lane != 0) return;
    const int raw_blocks = plan.stage_bytes / plan.raw_plane_bytes;
    for (int j = 0, tile = blockIdx.x; tile < a.tiles; ++j, tile += gridDim.x) {
      const int stage = a.stage_of(j);
      uint64_t* const full = ring.begin(j, a);
      mbarrier_expect(full, raw_blocks * loaded * kRowBytes);
      copy_tile<kRowBytes / int{sizeof(T)}>(&dy_map, full, stages + stage * plan.stage_bytes, a,
                                            tile, raw_blocks, plan.raw_plane_bytes);
      if (j > 0 || !a.copy_weights) continue;
      for (int r = a.r - 1, i = 0; r >= 0; --r) {  // the last filter row is needed first
        for (int block = 0; block < plan.blocks; ++block, ++i) {
          mbarrier_expect(&weights_full[i], Tr::kWeightTile);
          tma_load_4d(&w_map, &weights_full[i],
                      shared_address(shared + (r * plan.blocks + block) * Tr::kWeightTile), 0,
                      block * Tr::kBlock, 0, r);
        }
      }
    }
    return;
  }

  if constexpr (sizeof(T) == 4) {
    if (load_weights(a, w, shared, threadIdx.x, Tr::kGroups * 128, Tr{})) special_weights = 1;
    fence_async_proxy();
    named_barrier(1, Tr::kGroups * 128);
  }

  int rows_left_before = -1, images_left_before = -1;
  int offsets[2];  // of this thread's positions in the tile, or -1
  float acc[kN / 2];
  for (int j = group, tile = blockIdx.x + group * gridDim.x, turn = 0; tile < a.tiles;
       j += Tr::kGroups, tile += Tr::kGroups * gridDim.x, turn ^= 1) {
    const TilePlace place = place_of(a, tile);
    if (place.rows_left != rows_left_before || place.images_left != images_left_before) {
      rows_left_before = place.rows_left, images_left_before = place.images_left;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int position = warp % 4 * 16 + lane / 4 + 8 * half;
        offsets[half] = output_offset(a, position, place.rows_left, place.images_left);
      }
    }

    const int stage = a.stage_of(j);
    ring.wait(j, a);
    const unsigned char* tile_operands = stages + stage * plan.stage_bytes;
    if constexpr (kPlanes > 1) {
      tile_operands = parts + group * plan.blocks * kPlanes * plan.plane_bytes;
      split_tile<kPlanes, kRowBytes>(
          ring, j, a, stages + stage * plan.stage_bytes,
          parts + group * plan.blocks * kPlanes * plan.plane_bytes,
          {plan.blocks, loaded, 2 * plan.raw_plane_bytes, plan.raw_plane_bytes, plan.plane_bytes},
          2 + group, special_tile[group], turn);
    }

    const bool plain = kPlanes > 1 && (special_weights || special_tile[group][turn]);
    if (!plain) {
      const uint32_t dy_address = shared_address(tile_operands), w_address = shared_address(shared);
      wgmma_touch(acc);
      if constexpr (kPlanes > 1) {
#pragma unroll
        for (int v = 0; v < kN / 2; ++v) acc[v] = 0;
      }
      for (int i = 0; i < weight_tiles; ++i) {
        const int shift = i / plan.blocks, block = i - shift * plan.blocks;
        const uint64_t dy_desc = wgmma_descriptor<kRowBytes>(
            dy_address + block * kPlanes * plan.plane_bytes + shift * a.pitch * kRowBytes);
        const uint32_t w_tile =
            w_address + ((a.r - 1 - shift) * plan.blocks + block) * kPlanes * Tr::kWeightTile;
        if constexpr (kPlanes == 1) {
          const uint64_t w_desc = Tr::kTransposed ? wgmma_descriptor<kRowBytes>(w_tile)
                                                  : wgmma_descriptor<64>(w_tile, 64 * 64);
          if (a.copy_weights && j == group) mbarrier_wait(&weights_full[i], 0);
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            const int w_step = Tr::kTransposed ? step * 32 : step * 16 * 64;
            Wgmma<Op, kN>::template run<0, !Tr::kTransposed>(acc, wgmma_advance(dy_desc, step * 32),
                                                             wgmma_advance(w_desc, w_step),
                                                             i + step > 0);
          }
          wgmma_commit();
        } else {
          // Sums of few products of parts, so that the tensor cores' truncating additions are few.
          using Pairs = PartPairs<kPlanes>;
          static_assert(!Tr::kTransposed);
          const uint64_t w_desc = wgmma_descriptor<64>(w_tile, 64 * 64);
#pragma unroll
          for (int first = 0; first < 4; first += 2) {
            float part_sum[kN / 2];
            wgmma_touch(part_sum);
            wgmma_fence();
#pragma unroll
            for (int pair = 0; pair < Pairs::kCount; ++pair) {
#pragma unroll
              for (int step = first; step < first + 2; ++step) {
                Wgmma<Op, kN>::template run<0, 1>(
                    part_sum,
                    wgmma_advance(dy_desc, Pairs::first(pair) * plan.plane_bytes + step * 32),
                    wgmma_advance(w_desc, Pairs::second(pair) * Tr::kWeightTile + step * 16 * 64),
                    pair + step > first);
              }
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_touch(part_sum);
#pragma unroll
            for (int v = 0; v < kN / 2; ++v) acc[v] += part_sum[v];
          }
        }
      }
      wgmma_wait<0>();
      wgmma_touch(acc);
    }

    float gradient[4][2][2];
    shift_and_add(acc, edges + (2 * group + turn) * kGroupEdges, 2 + group, gradient);
    // All have read this tile.
    if (kPlanes == 1 && thread == 0) ring.release(j, a);
    if (plain) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        gradient[i / 4][i / 2 % 2][i % 2] = plain_gradient(
            a, shared, tile_operands, plan.plane_bytes, warp % 4 * 16 + lane / 4 + 8 * (i / 2 % 2),
            i / 4 * 8 + lane % 4 * 2 + i % 2);
      }
      named_barrier(2 + group, 128);  // nobody reads this tile
    }
    T* to = dx + first_output(a, place);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (sizeof(T) == 4) {
        if (offsets[half] >= 0) store_position(a, to + offsets[half], gradient, half);
      } else {
        store_position(a, offsets[half] >= 0 ? to + offsets[half] : nullptr, gradient, half);
      }
    }
  }
#endif
}

// False where a tile does not fit.
bool make_plan(const Conv2dShape& s, Plan& plan) {
  plan = {};
  Args& a = plan.args;
  a.c = static_cast<int>(s.k), a.k = static_cast<int>(s.c);
  a.r = static_cast<int>(s.r), a.s = static_cast<int>(s.s), a.images = static_cast<int>(s.n);
  a.p = static_cast<int>(s.h), a.q = static_cast<int>(s.w);
  a.pad_t = static_cast<int>(s.r - 1 - s.pad_h), a.pad_l = static_cast<int>(s.s - 1 - s.pad_w);
  if (!cut_into_tiles(a, static_cast<int>(s.q), static_cast<int>(s.p), kPositions, kRowBytes,
                      copied_and_multiplied(kPositions))) {
    return false;
  }
  const int planes = s.dtype == DType::kFloat32 && !s.allow_tf32 ? 3 : 1;
  const int groups = planes == 1 ? Traits<float, 1>::kGroups : Traits<float, 3>::kGroups;
  const int raw_blocks = a.c * static_cast<int>(size_of(s.dtype)) / kRowBytes;
  plan.blocks = planes == 1 ? raw_blocks : raw_blocks / 2;
  plan.plane_bytes = aligned(a.plane_rows * kRowBytes);
  plan.raw_plane_bytes =
      planes == 1 ? plan.plane_bytes : aligned(a.load_rows * a.tile_images * a.pitch * kRowBytes);
  plan.stage_bytes = raw_blocks * plan.raw_plane_bytes;
  const int fixed = 1024 + a.r * plan.blocks * planes * kN * kRowBytes +
                    (planes == 1 ? 0 : groups * plan.blocks * planes * plan.plane_bytes);
  const int limit = kSharedBytes - groups * 2 * kGroupEdges * static_cast<int>(sizeof(float));
  a.stages = std::min(kMaxStages, (limit - fixed) / plan.stage_bytes);
  plan.shared_bytes = fixed + a.stages * plan.stage_bytes;
  a.set_divisors();
  return fixed < limit && a.stages >= (planes == 1 ? groups : 1);
}

template <typename T, int kPlanes>
void launch(Stream stream, const Plan& plan, const CUtensorMap& dy_map, const CUtensorMap& w_map,
            const void* w, const void* dx) {
  using Tr = Traits<T, kPlanes>;
  const auto kernel = dgrad_kernel<T, kPlanes>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  // A batch that one wave takes at once is given a part of the device: wgrad runs concurrently.
  const int64_t wave = sm_count(), wanted = ceil_div(plan.args.tiles, Tr::kGroups);
  const unsigned blocks = std::min(wanted, wanted > wave ? wave : wave * 2 / 3);
  launch_early(kernel, blocks, Tr::kThreads, plan.shared_bytes, stream, dy_map, w_map, plan,
               static_cast<const T*>(w), static_cast<T*>(const_cast<void*>(dx)));
  check_launch("conv2d halo_narrow_dgrad");
}

}  // namespace
}  // namespace narrow

bool supports_narrow_dgrad(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool in_parts = s.dtype == DType::kFloat32 && !s.allow_tf32;
  narrow::Plan plan;
  return args.pass == Conv2dPass::kDgrad && s.c <= narrow::kChannels && s.s == narrow::kColumns &&
         s.r <= narrow::kMaxFilterRows &&
         s.k * size_of(s.dtype) % (in_parts ? 2 * narrow::kRowBytes : narrow::kRowBytes) == 0 &&
         tma_takes(s.dtype, args.other) && tma_takes(s.dtype, args.out) &&
         narrow::make_plan(s, plan);
}

void plan_narrow_dgrad(const Conv2dArgs& args, Conv2dPlan* plan) {
  narrow::Plan tiling;
  narrow::make_plan(args.shape, tiling);
  plan->tiling.set(tiling);
}

void run_narrow_dgrad(Stream stream, const Conv2dArgs& args, const Conv2dPlan& planned, void*) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef &dy = args.gathered, &w = args.other, &dx = args.out;
  narrow::Plan plan = planned.tiling.get<narrow::Plan>();
  Args& a = plan.args;
  a.w_k = w.c, a.w_c = w.n, a.w_r = w.h, a.w_s = w.w;
  a.y_n = dx.n, a.y_h = dx.h, a.y_w = dx.w;
  a.copy_weights = size_of(s.dtype) == 2;
  const auto extent = [](int64_t v) { return static_cast<uint32_t>(v); };
  const bool in_parts = s.dtype == DType::kFloat32 && !s.allow_tf32;
  const CUtensorMap dy_map =
      tensor_map(s.dtype, dy, s.k, s.q, s.p, s.n,
                 {extent(narrow::kRowBytes / size_of(s.dtype)), extent(a.pitch),
                  extent(a.load_rows), extent(a.tile_images)},
                 narrow::kRowBytes, !in_parts);
  CUtensorMap w_map = dy_map;  // unused where weights are transposed or split on the way
  if (a.copy_weights) {
    const Tensor4dRef by_column{w.data, w.h, w.c, w.w, w.n};  // [row][column][filter][channel]
    w_map = tensor_map(s.dtype, by_column, s.c, s.k, s.s, s.r,
                       {narrow::kChannels, 64, narrow::kColumns, 1}, 64);
  }
  const auto run = in_parts                      ? narrow::launch<float, 3>
                   : s.dtype == DType::kFloat32  ? narrow::launch<float, 1>
                   : s.dtype == DType::kBFloat16 ? narrow::launch<__nv_bfloat16, 1>
                                                 : narrow::launch<__half, 1>;
  run(stream, plan, dy_map, w_map, w.data, dx.data);
}

}  // namespace braze::cuda::halo
