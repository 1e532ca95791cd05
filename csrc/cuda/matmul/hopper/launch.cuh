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

// How many clusters of the kernel run at once; on its first use allows it its shared memory.
template <auto kKernel>
int resident_clusters(int cluster, int threads, int shared_bytes) {
  static std::atomic<int> known[64];
  int device = 0;
  cudaGetDevice(&device);
  std::atomic<int>& count = known[device % 64];
  if (const int clusters = count.load(std::memory_order_relaxed)) return clusters;
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
  return clusters;
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
  return matrix_map<typename Tile::T>(p.c, p.n, p.m, p.n, p.batch, p.m * p.n, Tile::kChunk);
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

// The same with the depth split over `cluster` blocks.
template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap, typename A = Args>
void launch_cluster_split(Stream stream, const MatmulArgs& p, int cluster, const A& epilogue = {}) {
  using T = typename Tile::T;
  const Operand a = operand_a(p), b = operand_b(p);
  const Operand &rows = kSwap ? b : a, &columns = kSwap ? a : b;
  A args = epilogue;
  set_tiles<Tile>(args, p, rows, columns);
  args.cluster_bits = cluster == 8 ? 3 : cluster == 4 ? 2 : 1;
  const CUtensorMap row_map = operand_map<T>(rows, p.k, p.batch, Tile::kRows);
  const CUtensorMap column_map = operand_map<T>(columns, p.k, p.batch, Tile::kColumns);
  constexpr auto kKernel = cluster_split_kernel<Tile, kRowMajor, kColumnMajor, kSwap, A>;
  resident_clusters<kKernel>(cluster, Tile::kThreads, Tile::kSharedBytes);
  launch_early_in_clusters(kKernel, static_cast<unsigned>(args.tiles * cluster), Tile::kThreads,
                           Tile::kSharedBytes, stream, cluster, row_map, column_map,
                           static_cast<const A&>(args));
  check_launch("matmul wgmma");
}

// The same in equal shares for all clusters.
template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap>
void launch_stream_k(Stream stream, const MatmulArgs& p, void* workspace) {
  using T = typename Tile::T;
  static_assert(Tile::kColumnBox * Tile::kCluster == Tile::kColumns);
  const Operand a = operand_a(p), b = operand_b(p);
  const Operand &rows = kSwap ? b : a, &columns = kSwap ? a : b;
  StreamArgs args{};
  set_tiles<Tile>(args, p, rows, columns);
  constexpr auto kKernel = stream_k_kernel<Tile, kRowMajor, kColumnMajor, kSwap>;
  const int resident =
      resident_clusters<kKernel>(Tile::kCluster, Tile::kThreads, Tile::kSharedBytes);
  args.stream_tiles = tiles_to_share(args.tiles, resident);
  const int shared_stages = args.stream_tiles * args.depth_tiles;
  args.clusters = std::min(resident, args.stream_tiles ? shared_stages : args.tiles);
  args.share = shared_stages / args.clusters, args.longer = shared_stages % args.clusters;
  args.parts = static_cast<float4*>(workspace);
  const CUtensorMap row_map = operand_map<T>(rows, p.k, p.batch, Tile::kRows);
  const CUtensorMap column_map = operand_map<T>(columns, p.k, p.batch, Tile::kColumnBox);
  const CUtensorMap c_map = output_map<Tile>(args, p, row_map);
  launch_early_in_clusters(kKernel, static_cast<unsigned>(args.clusters * Tile::kCluster),
                           Tile::kThreads, Tile::kSharedBytes, stream, Tile::kCluster, row_map,
                           column_map, c_map, static_cast<const StreamArgs&>(args));
  check_launch("matmul stream_k");
  if (args.stream_tiles == 0) return;
  const dim3 grid(args.stream_tiles * Tile::kCluster, Tile::kPieces);
  launch_early(stream_k_sum_kernel<Tile, kSwap>, grid, Tile::kConsumerThreads, 0, stream, args);
  check_launch("matmul stream_k_sum");
}

// Calls f(std::bool_constant, std::bool_constant): whether the rows' operand and the columns' one
// are MN-major. TF32 takes columns K-major only.
template <typename T, typename F>
void dispatch_mn_majors(const MatmulArgs& p, bool swap, F&& f) {
  const bool a = operand_a(p).mn_major(), b = operand_b(p).mn_major();
  const bool rows = swap ? b : a, columns = swap ? a : b;
  if constexpr (sizeof(T) == 2) {
    if (columns)
      return rows ? f(std::true_type{}, std::true_type{}) : f(std::false_type{}, std::true_type{});
  }
  rows ? f(std::true_type{}, std::false_type{}) : f(std::false_type{}, std::false_type{});
}

template <typename T, bool kSwap>
void launch_shape(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace) {
  dispatch_mn_majors<T>(p, kSwap, [&](auto row_major, auto column_major) {
    constexpr bool kR = row_major.value, kC = column_major.value;
    constexpr int kWideStages = sizeof(T) == 2 ? 4 : 5;
    const auto split = [&](auto tile) {
      launch_cluster_split<decltype(tile), kR, kC, kSwap>(stream, p, plan.cluster);
    };
    const auto stream_k = [&](auto tile) {
      launch_stream_k<decltype(tile), kR, kC, kSwap>(stream, p, workspace);
    };
    switch (plan.shape) {
      case Shape::kLarge: return launch<Tile<T, 128, 256, 4, 2>, kR, kC, kSwap>(stream, p);
      case Shape::kWide: return launch<Tile<T, 128, 192, kWideStages, 2>, kR, kC, kSwap>(stream, p);
      case Shape::kMedium: return launch<Tile<T, 128, 128, 6, 1>, kR, kC, kSwap>(stream, p);
      case Shape::kFlat: return launch<Tile<T, 64, 192, 6, 1, 1>, kR, kC, kSwap>(stream, p);
      case Shape::kSmall: return launch<Tile<T, 128, 64, 8, 1>, kR, kC, kSwap>(stream, p);
      case Shape::kTiny: return launch<Tile<T, 64, 64, 8, 1, 1>, kR, kC, kSwap>(stream, p);
      case Shape::kWideSplit: return split(SmallTile<T, 128, 192, 5>{});
      case Shape::kMediumSplit: return split(SmallTile<T, 128, 128, 6>{});
      case Shape::kSmallSplit: return split(SmallTile<T, 128, 64, 8>{});
      case Shape::kTinySplit: return split(SmallTile<T, 64, 64, 8>{});
      case Shape::kLargeStream: return stream_k(StreamTile<T, 128, 256, 4, 2>{});
      case Shape::kMediumStream: return stream_k(StreamTile<T, 128, 128, 6, 1>{});
      default: throw std::runtime_error("matmul: no kernel of this tile shape");
    }
  });
}

// 16-bit products that are swapped: those in tiles of 144 columns, and some in tiles of 128 x 192.
template <typename T>
void launch_swapped(Stream stream, const MatmulArgs& p, const Plan& plan) {
  dispatch_mn_majors<T>(p, true, [&](auto row_major, auto column_major) {
    constexpr bool kR = row_major.value, kC = column_major.value;
    if (plan.shape == Shape::kWide) return launch<Tile<T, 128, 192, 4, 2>, kR, kC, true>(stream, p);
    if constexpr (kC) {
      if (plan.shape == Shape::kMedium144) {
        return launch<Tile<T, 128, 144, 5, 2, 2, 192>, kR, true, true>(stream, p);
      }
    } else {
      switch (plan.shape) {
        case Shape::kTall144: return launch<Tile<T, 256, 144, 4, 2>, kR, false, true>(stream, p);
        case Shape::kMedium144: return launch<Tile<T, 128, 144, 5, 2>, kR, false, true>(stream, p);
        case Shape::kFlat144: return launch<Tile<T, 64, 144, 8, 2, 1>, kR, false, true>(stream, p);
        default: break;
      }
    }
    throw std::runtime_error("matmul: no swapped kernel of this tile shape");
  });
}

// The same with the full epilogue, for the shapes that have it.
template <typename T, bool kSwap>
void launch_full(Stream stream, const MatmulArgs& p, const Plan& plan, void* sums) {
  const SumParts parts = sum_parts(p, plan);
  float *const columns = parts.columns<float>(p, sums), *const rows = parts.rows<float>(p, sums);
  const auto is_aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % (2 * sizeof(T)) == 0;
  };
  FullArgs epilogue{};
  epilogue.residual = p.residual, epilogue.relu_result = p.relu_result;
  epilogue.pairs = p.n % 2 == 0 && is_aligned(p.residual) && is_aligned(p.relu_result);
  epilogue.column_parts = kSwap ? rows : columns;
  epilogue.row_parts = kSwap ? columns : rows;
  dispatch_mn_majors<T>(p, kSwap, [&](auto row_major, auto column_major) {
    constexpr bool kR = row_major.value, kC = column_major.value;
    constexpr int kWideStages = sizeof(T) == 2 ? 4 : 5;
    switch (plan.shape) {
      case Shape::kWide:
        return launch<Tile<T, 128, 192, kWideStages, 2>, kR, kC, kSwap>(stream, p, true, epilogue);
      case Shape::kMedium:  // a stage less than without the sums
        return launch<Tile<T, 128, 128, 5, 1>, kR, kC, kSwap>(stream, p, true, epilogue);
      case Shape::kSmallSplit:
        return launch_cluster_split<SmallTile<T, 128, 64, 8>, kR, kC, kSwap>(
            stream, p, plan.cluster, epilogue);
      default: throw std::runtime_error("matmul: no full epilogue for this tile shape");
    }
  });
}

template <typename T>
void run(Stream stream, const MatmulArgs& p, const Plan& plan, void* workspace) {
  const bool full = p.has_full_epilogue();
  if (plan.swap) {
    if constexpr (sizeof(T) == 2) {
      return launch_swapped<T>(stream, p, plan);
    } else {
      return full ? launch_full<T, true>(stream, p, plan, workspace)
                  : launch_shape<T, true>(stream, p, plan, workspace);
    }
  }
  full ? launch_full<T, false>(stream, p, plan, workspace)
       : launch_shape<T, false>(stream, p, plan, workspace);
}

}  // namespace braze::cuda::hopper
