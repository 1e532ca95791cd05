// From MatmulArgs to the Hopper kernel: tensor maps, tile counts, launch.
#pragma once

#include "cuda/matmul/ladder/13_persistent.cuh"
#include "cuda/matmul/ladder/15_cluster_split.cuh"
#include "cuda/matmul/ladder/16_stream_k.cuh"
#include <atomic>

#include "plan.cuh"
#include "launchers/matmul.h"

namespace braze::cuda::hopper {

template <typename T>
CUtensorMapDataType tensor_map_type() {
  // TMA rounds to TF32, where the tensor cores would truncate.
  return std::is_same_v<T, float>    ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
         : std::is_same_v<T, double> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT64
         : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Boxes are `width` elements, 128 bytes, by `height`.
template <typename T>
CUtensorMap matrix_map(const void* data, int64_t inner, int64_t outer, int64_t ld, int64_t batch,
                       int64_t batch_stride, int height) {
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  const uint64_t size = sizeof(T);
  if (batch_stride == 0) batch_stride = ld * outer;
  return make_tensor_map(
      tensor_map_type<T>(), data, {u(inner), u(outer), u(batch), 1},
      {u(ld) * size, u(batch_stride) * size, u(batch_stride) * size},
      {static_cast<uint32_t>(kSwizzle / sizeof(T)), static_cast<uint32_t>(height), 1, 1}, kSwizzle);
}

template <typename T>
CUtensorMap operand_map(const Operand& o, int64_t k, int64_t batch, int outer_box) {
  const int64_t count = copies(o, batch);
  if (o.mn_major()) {
    return matrix_map<T>(o.data, o.outer, k, o.depth_stride, count, o.batch, kSwizzle / sizeof(T));
  }
  return matrix_map<T>(o.data, k, o.outer, o.outer_stride, count, o.batch, outer_box);
}

// How many clusters of the kernel run at once, on the multiprocessors that it may count on; on its
// first use allows it its shared memory.
template <auto kKernel>
int resident_clusters(int cluster, int threads, int shared_bytes) {
  static std::atomic<int> known[64];
  int device = 0;
  cudaGetDevice(&device);
  std::atomic<int>& count = known[device % 64];
  const auto allowed = [&](int clusters) {
    return std::clamp(multiprocessor_limit.load(std::memory_order_relaxed) / cluster, 1, clusters);
  };
  if (const int clusters = count.load(std::memory_order_relaxed)) return allowed(clusters);
  cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config);
  if (error != cudaSuccess || clusters == 0) {
    throw std::runtime_error(std::string("matmul: the kernel does not fit the device: ") +
                             cudaGetErrorString(error));
  }
  count.store(clusters, std::memory_order_relaxed);
  return allowed(clusters);
}

// What the tiles of a product, each in `splits` parts, are and where they go.
template <typename Tile>
void set_tiles(Args& args, const MatmulArgs& p, const Operand& rows, const Operand& columns,
               int splits = 1) {
  args.rows = static_cast<int>(rows.outer), args.columns = static_cast<int>(columns.outer);
  const int64_t tile_rows = ceil_div(rows.outer, Tile::kRows * Tile::kCluster);
  const int64_t tile_columns = ceil_div(columns.outer, Tile::kColumns);
  const int64_t tiles = p.batch * splits * tile_rows * tile_columns;
  if (tiles > INT_MAX) throw std::runtime_error("matmul: more than 2^31 - 1 tiles");
  args.order = TileOrder(tile_rows, tile_columns);
  args.depth_tiles = static_cast<int>(ceil_div(p.k, Tile::kDepth));
  args.tiles = static_cast<int>(tiles);
  args.row_batch = rows.batch != 0, args.column_batch = columns.batch != 0;
  args.c = p.c, args.c_batch = p.m * p.n, args.c_ld = p.n;
  args.direct = !tma_stores(p);
  args.bias = p.bias, args.relu = p.relu;
}

// C as TMA stores it, or where results are stored from registers, whose own map is not used,
// `other`.
template <typename Tile>
CUtensorMap output_map(const Args& args, const MatmulArgs& p, const CUtensorMap& other) {
  if (!Tile::kStaged || args.direct) return other;
  return matrix_map<typename Tile::T>(p.c, p.n, p.m, args.c_ld, p.batch, args.c_batch,
                                      Tile::kChunk);
}

// As many clusters as run at once or as there are tiles; the latter if not `persistent`.
template <typename Tile, auto kKernel, typename... Arguments>
void launch_persistent(Stream stream, int tiles, bool persistent, const Arguments&... arguments) {
  const int clusters =
      resident_clusters<kKernel>(Tile::kCluster, Tile::kThreads, Tile::kSharedBytes);
  const unsigned blocks = (persistent ? std::min(tiles, clusters) : tiles) * Tile::kCluster;
  launch_early_in_clusters(kKernel, blocks, Tile::kThreads, Tile::kSharedBytes, stream,
                           Tile::kCluster, arguments...);
  check_launch("matmul wgmma");
}

// Rows of the product are those of A, or, swapped, the columns of B.
template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap, typename A = Args>
void launch(Stream stream, const MatmulArgs& p, bool persistent = true, const A& epilogue = {}) {
  using T = typename Tile::T;
  const Operand a = operand_a(p), b = operand_b(p);
  const Operand &rows = kSwap ? b : a, &columns = kSwap ? a : b;
  A args = epilogue;
  set_tiles<Tile>(args, p, rows, columns);
  const CUtensorMap row_map = operand_map<T>(rows, p.k, p.batch, Tile::kRows);
  const CUtensorMap column_map = operand_map<T>(columns, p.k, p.batch, Tile::kColumnBox);
  const CUtensorMap c_map = output_map<Tile>(args, p, row_map);
  launch_persistent<Tile, persistent_kernel<Tile, kRowMajor, kColumnMajor, kSwap, A>>(
      stream, args.tiles, persistent, row_map, column_map, c_map, args);
}

// Of tiles whose depth the blocks of a cluster split. args: with tiles and cluster_bits set.
template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap, typename A>
void launch_cluster_split(Stream stream, const A& args, const CUtensorMap& row_map,
                          const CUtensorMap& column_map) {
  constexpr auto kKernel = cluster_split_kernel<Tile, kRowMajor, kColumnMajor, kSwap, A>;
  const int cluster = 1 << args.cluster_bits;
  resident_clusters<kKernel>(cluster, Tile::kThreads, Tile::kSharedBytes);
  launch_early_in_clusters(kKernel, static_cast<unsigned>(args.tiles * cluster), Tile::kThreads,
                           Tile::kSharedBytes, stream, cluster, row_map, column_map, args);
  check_launch("matmul wgmma");
}

// A product with the depth split over `cluster` blocks.
template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap, typename A = Args>
void launch_split_product(Stream stream, const MatmulArgs& p, int cluster, const A& epilogue = {}) {
  using T = typename Tile::T;
  const Operand a = operand_a(p), b = operand_b(p);
  const Operand &rows = kSwap ? b : a, &columns = kSwap ? a : b;
  A args = epilogue;
  set_tiles<Tile>(args, p, rows, columns);
  args.cluster_bits = cluster == 8 ? 3 : cluster == 4 ? 2 : 1;
  const CUtensorMap row_map = operand_map<T>(rows, p.k, p.batch, Tile::kRows);
  const CUtensorMap column_map = operand_map<T>(columns, p.k, p.batch, Tile::kColumns);
  launch_cluster_split<Tile, kRowMajor, kColumnMajor, kSwap>(stream, args, row_map, column_map);
}

// The same in equal shares for all clusters. args: StreamArgs or made from it, with tiles set.
template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap, typename A>
void launch_shares(Stream stream, A args, const CUtensorMap& row_map, const CUtensorMap& column_map,
                   const CUtensorMap& c_map, void* workspace) {
  static_assert(Tile::kColumnBox * Tile::kCluster == Tile::kColumns);
  constexpr auto kKernel = stream_k_kernel<Tile, kRowMajor, kColumnMajor, kSwap, A>;
  const int resident =
      resident_clusters<kKernel>(Tile::kCluster, Tile::kThreads, Tile::kSharedBytes);
  const int splits = splits_of_tiles(args.tiles, args.depth_tiles, resident);
  args.set_shares(splits ? args.tiles : tiles_to_share(args.tiles, resident), splits, resident);
  args.parts = static_cast<float4*>(workspace);
  launch_early_in_clusters(kKernel, static_cast<unsigned>(args.clusters * Tile::kCluster),
                           Tile::kThreads, Tile::kSharedBytes, stream, Tile::kCluster, row_map,
                           column_map, c_map, static_cast<const A&>(args));
  check_launch("matmul stream_k");
  if (args.stream_tiles == 0 || args.splits == 1) return;
  const auto sum = [&](auto groups, auto kernel) {
    constexpr int kThreads = kSumThreads<Tile, groups.value>;
    const int blocks = Tile::kPieces * groups.value * Tile::kConsumerThreads / kThreads;
    launch_early(kernel, dim3(args.stream_tiles * Tile::kCluster, blocks), kThreads, 0, stream,
                 static_cast<const StreamArgs&>(args));
  };
  constexpr int kMany = 8;
  if (args.clusters >= kMany * args.stream_tiles) {
    sum(std::integral_constant<int, kMany>{}, stream_k_sum_kernel<Tile, kSwap, kMany>);
  } else {
    sum(std::integral_constant<int, 1>{}, stream_k_sum_kernel<Tile, kSwap, 1>);
  }
  check_launch("matmul stream_k_sum");
}

template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap>
void launch_stream_k(Stream stream, const MatmulArgs& p, void* workspace) {
  using T = typename Tile::T;
  const Operand a = operand_a(p), b = operand_b(p);
  const Operand &rows = kSwap ? b : a, &columns = kSwap ? a : b;
  StreamArgs args{};
  set_tiles<Tile>(args, p, rows, columns);
  const CUtensorMap row_map = operand_map<T>(rows, p.k, p.batch, Tile::kRows);
  const CUtensorMap column_map = operand_map<T>(columns, p.k, p.batch, Tile::kColumnBox);
  const CUtensorMap c_map = output_map<Tile>(args, p, row_map);
  launch_shares<Tile, kRowMajor, kColumnMajor, kSwap>(stream, args, row_map, column_map, c_map,
                                                      workspace);
}

// Calls f(std::bool_constant, std::bool_constant): whether the rows' operand and the columns' one
// are MN-major.
template <typename F>
void dispatch_mn_majors(const MatmulArgs& p, bool swap, F&& f) {
  const bool a = operand_a(p).mn_major(), b = operand_b(p).mn_major();
  const bool rows = swap ? b : a, columns = swap ? a : b;
  if (columns) {
    return rows ? f(std::true_type{}, std::true_type{}) : f(std::false_type{}, std::true_type{});
  }
  rows ? f(std::true_type{}, std::false_type{}) : f(std::false_type{}, std::false_type{});
}

// Calls f(std::integral_constant) with the number of a tile.
template <int kTile = 0, typename F>
void with_tile(int tile, F&& f) {
  if constexpr (kTile < kTileKindCount) {
    tile == kTile ? f(std::integral_constant<int, kTile>{}) : with_tile<kTile + 1>(tile, f);
  }
}

// A product by one kind of tile; `epilogue`: Args, or FullArgs for the full one.
template <typename T, int kTile, int kR, int kC, bool kSwap, typename A>
void launch_kind(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace,
                 const A& epilogue) {
  constexpr TileKind kKind = kTileKinds[kTile];
  constexpr int kStages = kKind.stages(sizeof(T), A::kFull);
  if constexpr (kKind.depth == Depth::kSplit) {
    launch_split_product<SmallTile<T, kKind.rows, kKind.columns, kStages>, kR, kC, kSwap>(
        stream, p, plan.cluster, epilogue);
  } else if constexpr (kKind.depth == Depth::kShares) {
    using Shares = StreamTile<T, kKind.rows, kKind.columns, kStages, kKind.blocks>;
    launch_stream_k<Shares, kR, kC, kSwap>(stream, p, workspace);
  } else {
    constexpr bool kSwapped16 = kSwap && sizeof(T) == 2;
    constexpr int kLoaded = kSwapped16 && kC ? kKind.swapped_mn_columns : kKind.columns;
    using Whole =
        Tile<T, kKind.rows, kKind.columns, kStages, kKind.blocks, kKind.consumers, kLoaded>;
    launch<Whole, kR, kC, kSwap>(stream, p, true, epilogue);
  }
}

template <typename T, bool kSwap, typename A>
void launch_plan(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace,
                 const A& epilogue) {
  dispatch_mn_majors(p, kSwap, [&](auto row_major, auto column_major) {
    with_tile(plan.tile, [&](auto tile) {
      constexpr bool kR = row_major.value, kC = column_major.value;
      if constexpr (kTileKinds[tile.value].compiled(sizeof(T), kSwap, kR, kC, A::kFull)) {
        launch_kind<T, tile.value, kR, kC, kSwap>(stream, p, plan, workspace, epilogue);
      } else {
        throw std::runtime_error("matmul: no kernel of this tile shape");
      }
    });
  });
}

// The full epilogue, whose sums' parts are at the workspace's start.
template <typename T>
FullArgs full_args(const MatmulArgs& p, const Plan& plan, void* sums) {
  const SumParts parts = sum_parts(p, plan);
  float *const columns = parts.columns<float>(p, sums), *const rows = parts.rows<float>(p, sums);
  const auto is_aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % (2 * sizeof(T)) == 0;
  };
  FullArgs epilogue{};
  epilogue.residual = p.residual, epilogue.relu_result = p.relu_result;
  epilogue.pairs = p.n % 2 == 0 && is_aligned(p.residual) && is_aligned(p.relu_result);
  epilogue.column_parts = plan.swap ? rows : columns;
  epilogue.row_parts = plan.swap ? columns : rows;
  return epilogue;
}

template <typename T>
void run(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace) {
  const auto launch_with = [&](const auto& epilogue) {
    plan.swap ? launch_plan<T, true>(stream, p, plan, workspace, epilogue)
              : launch_plan<T, false>(stream, p, plan, workspace, epilogue);
  };
  if (p.has_full_epilogue()) {
    launch_with(full_args<T>(p, plan, workspace));
  } else {
    launch_with(Args{});
  }
}

}  // namespace braze::cuda::hopper
