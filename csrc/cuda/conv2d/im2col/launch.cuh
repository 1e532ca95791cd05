// From a pass to the kernel: tensor maps, tile counts, launch. Each .cu beside compiles one type.
#pragma once

#include "added.cuh"
#include "copies.cuh"
#include "cuda/matmul/hopper/launch.cuh"
#include "cuda/matmul/hopper/turns.cuh"
#include "launchers/transpose.h"
#include "moments.cuh"
#include "norm_grad.cuh"
#include "tail.cuh"
#include "wgrad.cuh"

namespace braze::cuda::im2col {

// The matrix product's tiles that are compiled for windows. Others are for products of few rows, or
// only swapped.
constexpr bool has_tile(const hopper::TileKind& t) {
  return t.depth == hopper::Depth::kWhole && t.rows == 128 && (t.plain || t.swapped_columns == 0);
}

// And those whose depth a cluster splits, for few tiles.
constexpr bool has_split_tile(const hopper::TileKind& t) {
  return t.depth == hopper::Depth::kSplit && t.columns <= 128;
}

// And those that consumers take in turns, where nothing but bias and ReLU follows.
constexpr bool has_turn_tile(const hopper::TileKind& t) { return t.depth == hopper::Depth::kTurns; }

// And that of twice the rows, for the same: columns are loaded half as often.
constexpr bool has_tall_tile(const hopper::TileKind& t) {
  return t.depth == hopper::Depth::kWhole && t.rows == 256 && t.swapped_columns == 0;
}

// How a pass goes: the tile's number in hopper::kTileKinds, and how many blocks split its depth,
// log2.
struct Variant {
  int tile, cluster_bits;

  static Variant of(int number) {
    return {number % hopper::kTileKindCount, number / hopper::kTileKindCount};
  }
  int number() const { return tile + cluster_bits * hopper::kTileKindCount; }
  int cluster() const { return 1 << cluster_bits; }
  constexpr const hopper::TileKind& kind() const { return hopper::kTileKinds[tile]; }
};

// And those of the weight gradient. A cluster splits its depth in 16 bits only: TF32 turns columns
// (matmul/hopper/turn_columns.cuh), for which that kernel has no warps.
constexpr bool has_wgrad_tile(const hopper::TileKind& t) {
  return t.depth == hopper::Depth::kShares;
}
constexpr bool has_wgrad_split_tile(const hopper::TileKind& t, int64_t size) {
  return size == 2 && has_split_tile(t);
}

// And those of gradients with a Conv2dNormGrad, which keep sums in registers beside a tile's.
constexpr bool has_sums_tile(const hopper::TileKind& t) {
  return has_tile(t) && t.blocks == 1 && t.columns <= 128;
}

// variant: a Variant's number.
void run_bf16(Stream stream, const Conv2dArgs& args, int variant, void* workspace);
void run_fp16(Stream stream, const Conv2dArgs& args, int variant, void* workspace);
// added: what is added to an input gradient of stride 1, or nullptr.
void run_tf32(Stream stream, const Conv2dArgs& args, int variant, void* workspace,
              const void* added = nullptr);

void run_norm_grad_bf16(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                        const Conv2dNormGrad& norm, void* workspace);
void run_norm_grad_fp16(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                        const Conv2dNormGrad& norm, void* workspace);
void run_norm_grad_tf32(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                        const Conv2dNormGrad& norm, void* workspace);

// The result as a matrix of pixels by filters, which is what hopper/launch.cuh stores.
inline MatmulArgs result_matrix(const Conv2dArgs& args, const Pass& pass) {
  MatmulArgs p{};
  p.dtype = args.shape.dtype;
  p.batch = 1, p.m = pass.pixels, p.n = pass.filters;
  p.k = pass.taps * pass.windows.blocks * hopper::kSwizzle / size_of(p.dtype);
  p.c = const_cast<void*>(args.out.data);
  p.bias = args.bias, p.relu = args.relu;
  return p;
}

// How many clusters share a column of tiles, where each goes down one. 0 where that would leave
// multiprocessors idle.
inline int clusters_of_column(const MatmulArgs& p, const hopper::TileKind& t) {
  const int64_t clusters = sm_count() / t.blocks, columns = ceil_div(p.n, t.columns);
  const int64_t rows = ceil_div(p.m, t.rows * t.blocks);
  const int64_t down = std::min(clusters / columns, rows);
  return down < rows && 10 * down * columns < 9 * clusters ? 0 : static_cast<int>(down);
}

// Of fprop that leaves moments: the rows of all clusters' first tiles, or 0: it has no such kernel.
inline int moment_rows(const Conv2dArgs& args, const MatmulArgs& p, const hopper::TileKind& t) {
  if (args.pass != Conv2dPass::kFprop || size_of(p.dtype) != 4) return 0;
  return clusters_of_column(p, t) * t.rows * t.blocks;
}

// Weights as matrices of filters by channels, one for each tap. The filters of fprop are outermost,
// so that rows go along the depth; those of dgrad are the channels, which are innermost. TF32 wants
// rows along the depth: `transposed` weights, by channel of the input, if not nullptr.
template <typename Tile, int kColumnMajor>
CUtensorMap weight_map(const Conv2dArgs& args, const void* transposed) {
  using T = typename Tile::T;
  const Conv2dShape& s = args.shape;
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  const uint64_t taps = u(s.r * s.s), c = u(s.c), k = u(s.k), size = sizeof(T);
  const uint32_t width = hopper::kSwizzle / sizeof(T);
  const uint32_t box = kColumnMajor ? width : uint32_t{Tile::kColumnBox};
  if (transposed) {
    return make_tensor_map(hopper::tensor_map_type<T>(), transposed, {k, c, taps, 1},
                           {k * size, c * k * size, c * k * size}, {width, box, 1, 1},
                           hopper::kSwizzle);
  }
  return make_tensor_map(hopper::tensor_map_type<T>(), args.other.data, {c, k, taps, 1},
                         {taps * c * size, c * size, c * size}, {width, box, 1, 1},
                         hopper::kSwizzle);
}

// Of TF32's input gradient: the transposed weights.
inline int64_t weight_bytes(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (args.pass != Conv2dPass::kDgrad || size_of(s.dtype) == 2) return 0;
  return s.k * s.r * s.s * s.c * size_of(s.dtype);
}

// Fills the workspace with them, if they are wanted, and returns it.
inline const void* transpose_weights(Stream stream, const Conv2dArgs& args, void* workspace) {
  if (weight_bytes(args) == 0) return nullptr;
  const Conv2dShape& s = args.shape;
  transpose_copy(stream, s.dtype, args.other.data, workspace, 1, s.k, s.r * s.s * s.c);
  return workspace;
}

template <typename Tile, int kColumnMajor, typename A>
void launch_split_depth(Stream stream, const Conv2dArgs& args, A a, const Pass& pass,
                        int cluster_bits, void* workspace) {
  const void* transposed = transpose_weights(stream, args, workspace);
  const MatmulArgs p = result_matrix(args, pass);
  hopper::set_tiles<Tile>(a, p, hopper::operand_a(p), hopper::operand_b(p));
  a.windows = pass.windows;
  a.cluster_bits = cluster_bits;
  hopper::launch_cluster_split<Tile, 0, kColumnMajor, false>(
      stream, a, window_map(args, Tile::kRows), weight_map<Tile, kColumnMajor>(args, transposed));
}

template <typename Tile, int kColumnMajor, typename A>
void launch(Stream stream, const Conv2dArgs& args, A a, const Pass& pass, void* workspace) {
  constexpr bool kScattered = A::kScattered, kMoments = std::is_same_v<A, MomentArgs>;
  const void* transposed = transpose_weights(stream, args, workspace);
  const MatmulArgs p = result_matrix(args, pass);
  hopper::set_tiles<Tile>(a, p, hopper::operand_a(p), hopper::operand_b(p));
  a.windows = pass.windows;
  const CUtensorMap row_map = window_map(args, Tile::kRows);
  const CUtensorMap column_map = weight_map<Tile, kColumnMajor>(args, transposed);
  const CUtensorMap c_map = kScattered ? row_map : hopper::output_map<Tile>(a, p, row_map);
  constexpr auto kKernel = hopper::persistent_kernel<Tile, 0, kColumnMajor, false, A>;
  int clusters = a.tiles;
  if constexpr (kMoments || A::kTail || A::kSums) {
    a.tile_columns = FastDiv(ceil_div(p.n, Tile::kColumns));
    const int columns = a.tile_columns.divisor();
    if constexpr (kMoments) {
      static_assert(Tile::kConsumers == 2 && Tile::kBlocks == 1 && Tile::kRows == 128);
      clusters = a.first_rows / a.cluster_rows * columns;
    } else if constexpr (A::kSums) {
      clusters = a.sets * columns;
    } else {
      const int resident =
          hopper::resident_clusters<kKernel>(Tile::kCluster, Tile::kThreads, Tile::kSharedBytes);
      if (clusters > resident && resident >= columns) clusters = resident / columns * columns;
    }
  }
  hopper::launch_persistent<Tile, kKernel>(stream, clusters, !kMoments && !A::kSums, row_map,
                                           column_map, c_map, a);
}

// A tensor laid out as the result, for boxes of a tile's rows. Not as TMA reads operands, which it
// rounds to TF32.
template <typename T>
CUtensorMap tensor_like_result(const void* data, const Pass& pass, int tile_rows) {
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  const uint64_t row = u(pass.filters) * sizeof(T), all = row * u(pass.pixels);
  const auto type = sizeof(T) == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : hopper::tensor_map_type<T>();
  return make_tensor_map(type, data, {u(pass.filters), u(pass.pixels), 1, 1}, {row, all, all},
                         {hopper::kSwizzle / sizeof(T), static_cast<uint32_t>(tile_rows), 1, 1},
                         hopper::kSwizzle);
}

template <typename T>
void run_norm_grad(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                   const Conv2dNormGrad& norm, void* workspace) {
  hopper::with_tile(plan.variant, [&](auto tile) {
    constexpr hopper::TileKind kKind = hopper::kTileKinds[tile.value];
    if constexpr (has_sums_tile(kKind)) {
      // 16-bit results are staged: the sums take the room of a stage.
      constexpr int kStages = kKind.stages(sizeof(T), false) - (sizeof(T) == 2 ? 1 : 0);
      using Tile =
          hopper::Tile<T, kKind.rows, kKind.columns, kStages, kKind.blocks, kKind.consumers>;
      const Pass pass = pass_of(args);
      NormGradArgs a{};
      a.adds = norm.added != nullptr;
      a.before = tensor_like_result<T>(norm.before, pass, kKind.rows);
      a.added = a.adds ? tensor_like_result<T>(norm.added, pass, kKind.rows) : a.before;
      a.mask = norm.mask;
      a.clamps = !norm.mask && !norm.activation.identity();
      a.low = static_cast<float>(norm.activation.first);
      a.high = static_cast<float>(norm.activation.second);
      a.mean = static_cast<const float*>(norm.statistics.mean);
      a.scale = static_cast<const float*>(norm.statistics.scale);
      a.shift = static_cast<const float*>(norm.statistics.shift);
      a.sums = reinterpret_cast<float2*>(norm.sums);
      a.sets = plan.moment_sets;
      launch<Tile, sizeof(T) == 2 ? 1 : 0>(stream, args, a, pass, workspace);
    }
  });
}

// Swizzled rows of channels of all taps of the weight gradient, if these lie side by side in one
// product: if none is left unfilled.
inline int64_t wgrad_boxes(const Conv2dShape& s) {
  const int64_t bytes = s.c * size_of(s.dtype);
  return bytes % kRowBytes == 0 ? s.r * s.s * bytes / kRowBytes : 0;
}

// The weight gradient as one product, or as one for each tap: C's rows are filters.
inline MatmulArgs gradient_matrices(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const bool side_by_side = wgrad_boxes(s) > 0;
  MatmulArgs p{};
  p.dtype = s.dtype;
  p.batch = side_by_side ? 1 : s.r * s.s, p.n = side_by_side ? s.r * s.s * s.c : s.c;
  p.m = s.k, p.k = s.n * s.p * s.q;
  p.a = {args.other.data, 0, 1, s.k};  // the gradients of the result, dense
  p.b = {args.gathered.data, 0, args.gathered.w, 1};
  p.c = const_cast<void*>(args.out.data);
  return p;
}
// By stream-K, or by clusters that split its depth.
template <typename T, int kTile>
void launch_wgrad(Stream stream, const Conv2dArgs& args, int cluster_bits, void* workspace) {
  constexpr hopper::TileKind kKind = hopper::kTileKinds[kTile];
  constexpr bool kShares = kKind.depth == hopper::Depth::kShares;
  constexpr int kStages = kKind.stages(sizeof(T), false);
  using Shares = hopper::StreamTile<T, kKind.rows, kKind.columns, kStages, kKind.blocks>;
  using Small = hopper::SmallTile<T, kKind.rows, kShares ? 64 : kKind.columns, kStages>;
  using Tile = std::conditional_t<kShares, Shares, Small>;
  const MatmulArgs p = gradient_matrices(args);
  const hopper::Operand gradients = hopper::operand_a(p), image = hopper::operand_b(p);
  WgradArgs a{};
  hopper::set_tiles<Tile>(a, p, gradients, image);
  a.c_batch = p.n, a.c_ld = p.batch * p.n;
  a.cluster_bits = cluster_bits;
  a.windows = pass_of(args).windows;
  a.boxes = static_cast<int>(wgrad_boxes(args.shape));
  const CUtensorMap pixels = window_map(args, Tile::kDepth);
  const CUtensorMap other = hopper::operand_map<T>(gradients, p.k, 1, Tile::kRows);
  if constexpr (kShares) {
    const CUtensorMap c_map = hopper::output_map<Tile>(a, p, other);
    hopper::launch_shares<Tile, 1, 1, false>(stream, a, other, pixels, c_map, workspace);
  } else {
    hopper::launch_cluster_split<Tile, 1, 1, false>(stream, a, other, pixels);
  }
}

// fprop and dgrad, as they are.
template <typename T, int kTile>
void run_in_turns(Stream stream, const Conv2dArgs& args, void* workspace) {
  constexpr hopper::TileKind kKind = hopper::kTileKinds[kTile];
  using Tile =
      hopper::TurnTile<T, kKind.rows, kKind.columns, kKind.stages(sizeof(T), false), kKind.blocks>;
  const void* transposed = transpose_weights(stream, args, workspace);
  const auto launch = [&](auto column_major, auto a, const Pass& pass, int64_t phases) {
    using A = decltype(a);
    MatmulArgs p = result_matrix(args, pass);
    p.batch = phases;
    hopper::set_tiles<Tile>(a, p, hopper::operand_a(p), hopper::operand_b(p));
    a.windows = pass.windows;
    if constexpr (A::kScattered) a.set_order(phases, Tile::kCluster);
    const CUtensorMap row_map = window_map(args, Tile::kRows);
    const CUtensorMap column_map = weight_map<Tile, column_major.value>(args, transposed);
    const CUtensorMap c_map = A::kScattered ? row_map : hopper::output_map<Tile>(a, p, row_map);
    hopper::launch_persistent<Tile, hopper::turns_kernel<Tile, 0, column_major.value, A>>(
        stream, a.tiles, true, row_map, column_map, c_map, a);
  };
  constexpr std::integral_constant<int, 0> kAlong;
  constexpr std::integral_constant<int, sizeof(T) == 2 ? 1 : 0> kOfDgrad;
  if (has_phases(args)) {
    PhaseArgs a{};
    const Pass pass = pass_of(args, &a.phases);
    launch(kOfDgrad, a, pass, args.shape.stride_h * args.shape.stride_w);
  } else if (args.pass == Conv2dPass::kDgrad) {
    launch(kOfDgrad, WindowArgs{}, pass_of(args), 1);
  } else {
    launch(kAlong, WindowArgs{}, pass_of(args), 1);
  }
}

// Without moments.
template <typename T>
void run_split_depth(Stream stream, const Conv2dArgs& args, const Variant& variant,
                     void* workspace) {
  hopper::with_tile(variant.tile, [&](auto tile) {
    constexpr hopper::TileKind kKind = hopper::kTileKinds[tile.value];
    if constexpr (has_split_tile(kKind)) {
      using Tile = hopper::SmallTile<T, kKind.rows, kKind.columns, kKind.stages(sizeof(T), false)>;
      const auto launch_with = [&](auto column_major, const auto& a) {
        launch_split_depth<Tile, column_major.value>(stream, args, a, pass_of(args),
                                                     variant.cluster_bits, workspace);
      };
      if (args.pass == Conv2dPass::kDgrad) {
        launch_with(std::integral_constant < int, sizeof(T) == 2 ? 1 : 0 > {}, WindowArgs{});
      } else if (args.tail) {
        SplitTailArgs a{};
        a.tail = Tail::of(args.tail, args.shape.dtype);
        a.added = args.tail->added;
        launch_with(std::integral_constant<int, 0>{}, a);
      } else {
        launch_with(std::integral_constant<int, 0>{}, WindowArgs{});
      }
    }
  });
}

template <typename T>
void run(Stream stream, const Conv2dArgs& args, int number, void* workspace,
         [[maybe_unused]] const void* added = nullptr) {
  const Variant variant = Variant::of(number);
  if (args.pass == Conv2dPass::kWgrad) {
    return hopper::with_tile(variant.tile, [&](auto tile) {
      constexpr hopper::TileKind kKind = hopper::kTileKinds[tile.value];
      if constexpr (has_wgrad_tile(kKind) || has_wgrad_split_tile(kKind, sizeof(T))) {
        launch_wgrad<T, tile.value>(stream, args, variant.cluster_bits, workspace);
      }
    });
  }
  if (variant.cluster_bits > 0) return run_split_depth<T>(stream, args, variant, workspace);
  hopper::with_tile(variant.tile, [&](auto tile) {
    constexpr hopper::TileKind kKind = hopper::kTileKinds[tile.value];
    if constexpr (kKind.stages(sizeof(T), false) == 0) {
      throw std::runtime_error("conv2d: no kernel of this tile shape");
    } else if constexpr (has_turn_tile(kKind)) {
      run_in_turns<T, tile.value>(stream, args, workspace);
    } else if constexpr (has_tall_tile(kKind)) {
      using Tile = hopper::Tile<T, kKind.rows, kKind.columns, kKind.stages(sizeof(T), false), 1>;
      const bool dgrad = args.pass == Conv2dPass::kDgrad;
      const auto launch_tall = dgrad ? launch<Tile, 1, WindowArgs> : launch<Tile, 0, WindowArgs>;
      launch_tall(stream, args, WindowArgs{}, pass_of(args), workspace);
    } else if constexpr (has_tile(kKind)) {
      using Tile = hopper::Tile<T, kKind.rows, kKind.columns, kKind.stages(sizeof(T), false),
                                kKind.blocks, kKind.consumers>;
      constexpr int kDgradMajor = sizeof(T) == 2 ? 1 : 0;
      const Pass pass = pass_of(args);
      if (args.pass == Conv2dPass::kDgrad) {
        if constexpr (sizeof(T) == 4) {
          AddedArgs a{};
          a.added = added;
          if (added) return launch<Tile, kDgradMajor>(stream, args, a, pass, workspace);
        }
        return launch<Tile, kDgradMajor>(stream, args, WindowArgs{}, pass, workspace);
      }
      if (args.tail) {
        TailArgs a{};
        a.tail = Tail::of(args.tail, args.shape.dtype);
        a.adds = args.tail->added != nullptr;
        if (a.adds) {
          a.added = tensor_like_result<T>(args.tail->added, pass, kKind.rows);
        }
        return launch<Tile, 0>(stream, args, a, pass, workspace);
      }
      if constexpr (sizeof(T) == 4) {
        if (args.moments) {
          MomentArgs a{};
          a.moments = args.moments;
          a.cluster_rows = kKind.rows * kKind.blocks;
          a.first_rows = moment_rows(args, result_matrix(args, pass), kKind);
          return launch<Tile, 0>(stream, args, a, pass, workspace);
        }
      }
      launch<Tile, 0>(stream, args, WindowArgs{}, pass, workspace);
    }
  });
}

}  // namespace braze::cuda::im2col
