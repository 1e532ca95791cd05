// From a pass to the kernel: tensor maps, tile counts, launch. Each .cu beside compiles one type.
#pragma once

#include "copies.cuh"
#include "cuda/matmul/hopper/launch.cuh"

namespace braze::cuda::im2col {

// The matrix product's tiles that are compiled for windows. Others are for products of few rows.
constexpr bool has_tile(const hopper::TileKind& t) {
  return t.depth == hopper::Depth::kWhole && t.plain && t.rows == 128;
}

void run_bf16(Stream stream, const Conv2dArgs& args, int tile);
void run_fp16(Stream stream, const Conv2dArgs& args, int tile);
void run_tf32(Stream stream, const Conv2dArgs& args, int tile);

// The result as a matrix of pixels by filters, which is what hopper/launch.cuh stores.
inline MatmulArgs result_matrix(const Conv2dArgs& args, const Pass& pass) {
  MatmulArgs p{};
  p.dtype = args.shape.dtype;
  p.batch = 1, p.m = pass.pixels, p.n = pass.filters;
  p.k = pass.taps * pass.windows.blocks.divisor() * hopper::kSwizzle / size_of(p.dtype);
  p.c = const_cast<void*>(args.out.data);
  p.bias = args.bias;
  return p;
}

// Weights as matrices of filters by channels, one for each tap. The filters of fprop are outermost,
// so that rows go along the depth; those of dgrad are the channels, which are innermost.
template <typename Tile, int kColumnMajor>
CUtensorMap weight_map(const Conv2dArgs& args) {
  using T = typename Tile::T;
  const Conv2dShape& s = args.shape;
  const auto u = [](int64_t v) { return static_cast<uint64_t>(v); };
  const uint64_t tap = u(args.other.w) * sizeof(T);
  const uint32_t width = hopper::kSwizzle / sizeof(T);
  return make_tensor_map(hopper::tensor_map_type<T>(), args.other.data,
                         {u(s.c), u(s.k), u(s.r * s.s), 1}, {u(args.other.n) * sizeof(T), tap, tap},
                         {width, kColumnMajor ? width : uint32_t{Tile::kColumnBox}, 1, 1},
                         hopper::kSwizzle);
}

template <typename Tile, int kColumnMajor>
void launch(Stream stream, const Conv2dArgs& args) {
  const Pass pass = pass_of(args);
  const MatmulArgs p = result_matrix(args, pass);
  WindowArgs a{};
  hopper::set_tiles<Tile>(a, p, hopper::operand_a(p), hopper::operand_b(p));
  a.windows = pass.windows;
  const CUtensorMap row_map = window_map(p.dtype, pass, Tile::kRows);
  const CUtensorMap column_map = weight_map<Tile, kColumnMajor>(args);
  const CUtensorMap c_map = hopper::output_map<Tile>(a, p, row_map);
  hopper::launch_persistent<Tile,
                            hopper::persistent_kernel<Tile, 0, kColumnMajor, false, WindowArgs>>(
      stream, a.tiles, true, row_map, column_map, c_map, a);
}

template <typename T>
void run(Stream stream, const Conv2dArgs& args, int number) {
  hopper::with_tile(number, [&](auto tile) {
    constexpr hopper::TileKind kKind = hopper::kTileKinds[tile.value];
    if constexpr (has_tile(kKind)) {
      using Tile = hopper::Tile<T, kKind.rows, kKind.columns, kKind.stages(sizeof(T), false),
                                kKind.blocks, kKind.consumers>;
      if constexpr (sizeof(T) == 2) {
        if (args.pass == Conv2dPass::kDgrad) return launch<Tile, 1>(stream, args);
      }
      launch<Tile, 0>(stream, args);
    }
  });
}

}  // namespace braze::cuda::im2col
