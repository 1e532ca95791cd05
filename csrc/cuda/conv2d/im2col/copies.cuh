// The matrix product's pipeline (matmul/ladder/13_persistent.cuh) with windows of images for rows:
// implicit GEMM whose gather is TMA's. The depth goes through a window's taps and, within a tap,
// its channels, a swizzled row of them at a stage. A run of result pixels may go on into the next
// line and the next image; of each, TMA finds the pixel that a tap meets, and gives zeros outside.
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/matmul/hopper/pipeline.cuh"
#include "windows.h"

namespace braze::cuda::im2col {

static_assert(kRowBytes == hopper::kSwizzle);

// Base: what a kernel of the matrix product takes.
template <typename Base>
struct WithWindows : Base {
  static constexpr bool kWindows = true;
  Windows windows;
};
using WindowArgs = WithWindows<hopper::Args>;

// Of kernels each of whose clusters stays in one column of tiles, where there are as many clusters
// as some multiple of the columns.
struct ColumnArgs : WindowArgs {
  FastDiv tile_columns;
};

__device__ __forceinline__ hopper::Place place_of(const ColumnArgs& a, int tile) {
  hopper::Place p;
  p.row = a.tile_columns.div(tile, p.column);
  p.batch = 0, p.first = 0, p.last = a.depth_tiles;
  return p;
}

// In which order the tiles of all phases are taken: as many of one as run at once, then the same of
// the next one. So the phases find the gradients that they share in L2, and every block has as much
// to do for each of them.
class PhaseOrder {
 public:
  PhaseOrder() = default;
  PhaseOrder(int64_t tiles, int64_t phases, int64_t at_once)
      : round_(at_once * phases),
        tiles_(at_once),
        last_tiles_(tiles % at_once == 0 ? at_once : tiles % at_once),
        whole_rounds_(static_cast<int>(tiles / at_once)) {}

  // tile: out of all phases' ones. Gives the phase, and which one of its tiles it is.
  __device__ __forceinline__ int place(int tile, int& in_phase) const {
    int in_round;
    const int round = round_.div(tile, in_round);
    const int phase = (round < whole_rounds_ ? tiles_ : last_tiles_).div(in_round, in_phase);
    in_phase += round * tiles_.divisor();
    return phase;
  }

 private:
  FastDiv round_, tiles_, last_tiles_;  // a round's tiles of all phases, of one, of one in the last
  int whole_rounds_ = 0;
};

// dgrad by phases, which are the product's batch. Its results are s pixels apart.
template <typename Base>
struct WithPhases : WithWindows<Base> {
  static constexpr bool kScattered = true;
  Phases phases;
  PhaseOrder phase_order;

  // count: of phases. Of clusters of `cluster` blocks, one for a multiprocessor.
  void set_order(int64_t count, int cluster) {
    phase_order = PhaseOrder(this->tiles / count, count, std::max(sm_count() / cluster, 1));
  }

  // Of a phase, where the row of a product goes, or nullptr where there is none.
  template <typename T>
  __device__ __forceinline__ auto rows_of(int phase) const {
    const auto [phase_h, phase_w] = phases.both(phase);
    return [this, first_h = phase_h.first, first_w = phase_w.first](int row) -> T* {
      int w, h;
      const int n = this->windows.rows.div(this->windows.columns.div(row, w), h);
      w = w * phases.stride_w + first_w;
      h = h * phases.stride_h + first_h;
      if (row >= this->rows || w >= phases.width || h >= phases.height) return nullptr;
      const int64_t line = int64_t{n} * phases.height + h;
      return static_cast<T*>(this->c) + (line * phases.width + w) * this->c_ld;
    };
  }
};
using PhaseArgs = WithPhases<hopper::Args>;

template <typename Base>
__device__ __forceinline__ hopper::Place place_of(const WithPhases<Base>& a, int tile) {
  int in_phase;
  const int phase = a.phase_order.place(tile, in_phase);
  hopper::Place p = hopper::place_of(static_cast<const hopper::Args&>(a), in_phase);
  p.batch = phase;
  const auto [h, w] = a.phases.both(p.batch);
  p.last = h.taps * w.taps * a.windows.blocks;
  return p;
}

template <typename Base>
__device__ __forceinline__ Taps taps_of(const WithWindows<Base>& a, int) {
  return Taps(a.windows);
}
template <typename Base>
__device__ __forceinline__ Taps taps_of(const WithPhases<Base>& a, int phase) {
  const auto [h, w] = a.phases.both(phase);
  return Taps(a.windows, w.taps, w.shift, h.shift, h.tap * a.phases.filter_w + w.tap);
}

// Rows are pixels of the result, columns filters; of the weights, taps are the batch.
template <typename A, typename Tile, int kColumnMajor>
class WindowCopies {
 public:
  __device__ __forceinline__ WindowCopies(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                          const A& a, const hopper::Place& p, int rank)
      : row_map_(row_map),
        column_map_(column_map),
        corner_(corner_of(a.windows, (p.row * Tile::kCluster + rank) * Tile::kRows)),
        taps_(taps_of(a, p.batch)),
        column_(p.column * Tile::kColumns),
        rank_(rank) {
    if (p.first > 0) taps_.skip_to(p.first);
  }

  __device__ __forceinline__ static constexpr uint32_t bytes() { return Tile::kStageBytes; }
  __device__ __forceinline__ void copy(int, uint64_t* full, uint32_t to) {
    const int channel = taps_.block() * Tile::kDepth, weights = taps_.weights();
    tma_load_im2col(row_map_, full, to, channel, corner_.w, corner_.h, corner_.n, taps_.right(),
                    taps_.down());
    hopper::for_column_boxes<Tile>(rank_, to, [&](int i, uint32_t box) {
      hopper::load<typename Tile::T, kColumnMajor, Tile::kColumnBox, Tile::kCluster>(
          column_map_, full, box, column_ + i, channel, weights);
    });
    taps_.next();
  }

 private:
  const CUtensorMap *row_map_, *column_map_;
  Corner corner_;
  Taps taps_;
  int column_, rank_;
};

}  // namespace braze::cuda::im2col

namespace braze::cuda::hopper {

// Of all that is made from WithWindows.
template <typename A, typename Tile, int kColumnMajor>
class Copies<A, Tile, 0, kColumnMajor, std::enable_if_t<A::kWindows>>
    : public im2col::WindowCopies<A, Tile, kColumnMajor> {
  using im2col::WindowCopies<A, Tile, kColumnMajor>::WindowCopies;
};

// What no channels fill is not multiplied.
template <typename A>
class Steps<A, std::enable_if_t<A::kWindows>> {
 public:
  __device__ __forceinline__ Steps(const A& a, int depth)
      : blocks_(a.windows.blocks),
        last_((a.windows.last_bytes * kSteps + kSwizzle - 1) / kSwizzle) {
    a.windows.by_blocks.div(depth, block_);
  }
  __device__ __forceinline__ int next() {
    const bool is_last = ++block_ == blocks_;
    if (is_last) block_ = 0;
    // From a shuffle the compiler learns that it is the same in all of a warp: else products wait
    // for each other (C7520).
    return __shfl_sync(~0u, is_last ? last_ : kSteps, 0);
  }

 private:
  int blocks_, last_, block_;
};

}  // namespace braze::cuda::hopper
