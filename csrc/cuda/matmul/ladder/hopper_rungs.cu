// The ladder's steps from wgmma to the shipped kernel, for 16-bit types.
#include "10_wgmma.cuh"
#include "11_warp_specialized.cuh"
#include "12_cluster.cuh"
#include "cuda/matmul/hopper/hopper.h"
#include "cuda/matmul/hopper/launch.cuh"

namespace braze::cuda::hopper {
namespace {

template <typename T, int kRowMajor, int kColumnMajor>
void launch_wgmma(Stream stream, const MatmulArgs& p) {
  using Tile = WgmmaTile<T>;
  const Operand a = operand_a(p), b = operand_b(p);
  Args args{};
  set_tiles<Tile>(args, p, a, b);
  const CUtensorMap row_map = operand_map<T>(a, p.k, p.batch, Tile::kRows);
  const CUtensorMap column_map = operand_map<T>(b, p.k, p.batch, Tile::kColumns);
  launch_early(wgmma_kernel<Tile, kRowMajor, kColumnMajor>, args.tiles, Tile::kThreads,
               Tile::kSharedBytes, stream, row_map, column_map, static_cast<const Args&>(args));
  check_launch("matmul 10_wgmma");
}

// Calls f(TypeTag of the element type, whether A is MN-major, whether B is) with constants.
template <typename F>
void dispatch_rung(const MatmulArgs& p, F f) {
  const auto dispatch = [&](auto tag) {
    dispatch_mn_majors(p, false,
                       [&](auto row_major, auto column_major) { f(tag, row_major, column_major); });
  };
  if (p.dtype == DType::kBFloat16) {
    dispatch(TypeTag<__nv_bfloat16>{});
  } else {
    dispatch(TypeTag<__half>{});
  }
}

}  // namespace

const char* rung_obstacle(const MatmulArgs& p) {
  return size_of(p.dtype) != 2 ? "it takes bfloat16 and float16" : obstacle(p);
}

void run_wgmma(Stream stream, const MatmulArgs& p) {
  dispatch_rung(p, [&](auto tag, auto row_major, auto column_major) {
    using T = typename decltype(tag)::type;
    launch_wgmma<T, row_major.value, column_major.value>(stream, p);
  });
}

void run_warp_specialized(Stream stream, const MatmulArgs& p) {
  dispatch_rung(p, [&](auto tag, auto row_major, auto column_major) {
    using T = typename decltype(tag)::type;
    launch_warp_specialized<T, row_major.value, column_major.value>(stream, p);
  });
}

void run_cluster(Stream stream, const MatmulArgs& p) {
  dispatch_rung(p, [&](auto tag, auto row_major, auto column_major) {
    using T = typename decltype(tag)::type;
    launch_cluster<T, row_major.value, column_major.value>(stream, p);
  });
}

}  // namespace braze::cuda::hopper
