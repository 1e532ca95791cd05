// Launches folded.cuh.
#include "folded.h"

#include "cuda/matmul/hopper/launch.cuh"
#include "folded.cuh"

namespace braze::cuda::pointwise {
namespace {

constexpr int kRows = 128;

template <typename T, int kColumns, int kStages, int kCluster>
void launch(Stream stream, const FoldedProduct& f, void* workspace) {
  using Tile = hopper::StreamTile<T, kRows, kColumns, kStages, kCluster>;
  MatmulArgs p{};
  p.dtype = f.dtype;
  p.batch = 1, p.m = f.m, p.n = f.n;
  const int64_t stages = ceil_div(f.pixels, Tile::kDepth);
  p.k = f.images * stages * Tile::kDepth;
  p.c = f.c;
  FoldedArgs a{};
  hopper::set_tiles<Tile>(a, p, hopper::operand_a(p), hopper::operand_b(p));
  a.stages = FastDiv(stages);
  const auto map = [&](const void* data, int64_t channels, int64_t image, int box) {
    return hopper::matrix_map<T>(data, f.pixels, channels, f.pixels, f.images, image, box);
  };
  const CUtensorMap row_map = map(f.a, f.m, f.a_image, Tile::kRows);
  const CUtensorMap column_map = map(f.b, f.n, f.b_image, Tile::kColumnBox);
  const CUtensorMap c_map = hopper::output_map<Tile>(a, p, row_map);
  hopper::launch_shares<Tile, 0, 0, false>(stream, a, row_map, column_map, c_map, workspace);
}

// Fewer columns where there are no more, or where pairs of blocks would have half their rows empty.
bool is_wide(const FoldedProduct& f) { return f.n > 128 && f.m > kRows; }

template <typename T>
void launch(Stream stream, const FoldedProduct& f, void* workspace) {
  is_wide(f) ? launch<T, 256, 4, 2>(stream, f, workspace)
             : launch<T, 128, 6, 1>(stream, f, workspace);
}

}  // namespace

const char* folded_obstacle(const FoldedProduct& f, bool allow_tf32) {
  if (!has_wgmma()) return "for contiguous images it needs a GPU of compute capability 9.0";
  if (f.dtype == DType::kFloat64 || (f.dtype == DType::kFloat32 && !allow_tf32)) {
    return "for contiguous images it takes float32 (as TF32), bfloat16 and float16";
  }
  const int64_t size = size_of(f.dtype);
  const auto takes = [&](const void* data, int64_t image) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && image * size % 16 == 0;
  };
  if (f.pixels * size % 16 != 0 || !takes(f.a, f.a_image) || !takes(f.b, f.b_image)) {
    return "contiguous images are multiples of 16 bytes, and aligned so";
  }
  const int64_t tiles = ceil_div(f.m, kRows) * ceil_div(f.n, 128);
  return tiles * f.images * ceil_div(f.pixels * size, 128) > INT_MAX
             ? "it counts stages with 31 bits"
             : nullptr;
}

int64_t folded_workspace_bytes(const FoldedProduct& f) {
  return int64_t{2} * sm_count() * kRows * (is_wide(f) ? 256 : 128) * int64_t{sizeof(float)};
}

void run_folded(Stream stream, const FoldedProduct& f, void* workspace) {
  switch (f.dtype) {
    case DType::kBFloat16: return launch<__nv_bfloat16>(stream, f, workspace);
    case DType::kFloat16: return launch<__half>(stream, f, workspace);
    case DType::kFloat32: return launch<float>(stream, f, workspace);
    case DType::kFloat64: break;  // an obstacle
  }
}

}  // namespace braze::cuda::pointwise
