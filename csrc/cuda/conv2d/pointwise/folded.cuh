// The weight gradient of contiguous tensors: the sum over images of products of dY (filters x
// pixels) and X (channels x pixels), both along the depth. Images are folded into the depth of one
// product by stream-K (matmul/ladder/16_stream_k.cuh): a stage is a run of one image's pixels, the
// last of an image filled up with zeros.
#pragma once

#include "cuda/matmul/ladder/16_stream_k.cuh"

namespace braze::cuda::pointwise {

struct FoldedArgs : hopper::StreamArgs {
  FastDiv stages;  // of an image
};

}  // namespace braze::cuda::pointwise

namespace braze::cuda::hopper {

template <typename Tile>
class Copies<pointwise::FoldedArgs, Tile, 0, 0> {
 public:
  __device__ __forceinline__ Copies(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                    const pointwise::FoldedArgs& a, const Place& p, int rank)
      : row_map_(row_map),
        column_map_(column_map),
        stages_(a.stages),
        row_((p.row * Tile::kCluster + rank) * Tile::kRows),
        column_(p.column * Tile::kColumns),
        rank_(rank) {}

  __device__ __forceinline__ static constexpr uint32_t bytes() { return Tile::kStageBytes; }
  __device__ __forceinline__ void copy(int d, uint64_t* full, uint32_t to) {
    int stage;
    const int image = stages_.div(d, stage);
    load<T, 0, Tile::kRows, 1>(row_map_, full, to, row_, stage * Tile::kDepth, image);
    for_column_boxes<Tile>(rank_, to, [&](int i, uint32_t box) {
      load<T, 0, Tile::kColumnBox, Tile::kCluster>(column_map_, full, box, column_ + i,
                                                   stage * Tile::kDepth, image);
    });
  }

 private:
  using T = typename Tile::T;
  const CUtensorMap *row_map_, *column_map_;
  const FastDiv& stages_;
  int row_, column_, rank_;
};

}  // namespace braze::cuda::hopper
