// How the halo kernels cut a batch of images into tiles.
#pragma once

#include <algorithm>
#include <climits>

#include "halo.h"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/tma.cuh"

namespace braze::cuda::halo {

constexpr int kFilters = 64;  // per block: the M of wgmma
constexpr int kMaxStages = 6;
constexpr int kMaxWeightTiles = 40;  // that are copied as they are, each with its barrier
constexpr int kSharedBytes = 227 * 1024 - 4 * 1024;  // dynamic; barriers and tables are static

// Up to the next multiple of the bytes after which the pattern of swizzled rows repeats.
constexpr int aligned(int bytes) { return (bytes + 1023) / 1024 * 1024; }

struct Args {
  int c, k, r, s;              // channels reduced over, channels computed, filter taps
  int images, p, q;            // images, output rows and columns; of stripes, all one by one
  int stripes;                 // of columns that an image is cut into; 1: none
  int pad_t, pad_l;            // zero rows above, zero columns on the left
  int pitch;                   // pixels from row to row in shared memory
  int tile_images, tile_rows;  // a tile: whole images, or rows of one image
  int image_rows;              // rows from image to image in shared memory
  int row_tiles, tiles;        // tiles per image (group of images), tiles in all
  int stages, plane_rows;      // pixels of shared memory per stage and channel block
  int stage_blocks, pieces;    // channel blocks of a stage; a tile passes through in so many
  int load_rows;               // rows that one copy brings
  int64_t w_k, w_c, w_r, w_s;  // weight strides, of the computed and of the reduced channel
  bool copy_weights;           // by TMA, as they are in memory
  bool early_weights;          // may be read before earlier kernels are done
  bool flip;                   // dgrad: taps in reverse order
  bool wide_stores;            // fp32 results 16 bytes at a time
  int64_t y_n, y_k, y_h, y_w;  // output strides
  // What kernels divide by: a division by the number itself takes as long as some products.
  FastDiv by_pitch, by_image_rows, by_row_tiles, by_stripes, by_stages;

  // To be called when all of these are known.
  void set_divisors() {
    by_pitch = FastDiv(pitch), by_image_rows = FastDiv(image_rows);
    by_row_tiles = FastDiv(row_tiles), by_stripes = FastDiv(stripes), by_stages = FastDiv(stages);
  }
  // Where a block's tile j is copied to.
  __device__ __forceinline__ int stage_of(int j) const {
    int stage;
    by_stages.div(j, stage);
    return stage;
  }
};

// The memory that a convolution's weights lie in.
inline Span weight_span(const Conv2dShape& s, const Tensor4dRef& w) {
  const int64_t last =
      (s.k - 1) * w.n + (s.c - 1) * w.c + (s.r - 1) * w.h + (s.s - 1) * w.w;  // one group
  return {w.data, (last + 1) * size_of(s.dtype)};
}

// A ring of stages that one thread fills with tiles, and kGroups groups of threads empty in turn:
// tile j is that of group j % kGroups. A wait sees no more of a phase than its parity, so whoever
// waits for a barrier has to have seen its last phase end. Copies may arrive out of order: a group
// that found the next tile to be there first would take the stage's last phase for its own. So a
// barrier belongs to a stage and a group.
template <int kGroups>
struct TileRing {
  uint64_t full[kMaxStages * kGroups], empty[kMaxStages * kGroups];

  // Called by all threads; a barrier of the block has to follow. readers: threads that release a
  // tile.
  __device__ __forceinline__ void init(int stages, int readers = 1) {
    if (threadIdx.x >= stages * kGroups) return;
    mbarrier_init(&full[threadIdx.x], 1);
    mbarrier_init(&empty[threadIdx.x], readers);
    mbarrier_init_fence();
  }
  // Waits until tile j's stage is free; returns what its copies have to arrive at. first_absent: of
  // the tiles whose turn it would be after the last one, which some groups have no more.
  __device__ __forceinline__ uint64_t* begin(int j, const Args& a, int first_absent = INT_MAX,
                                             int present = kGroups) {
    int before = j - a.stages;
    while (before >= first_absent && before % kGroups >= present) before -= a.stages;
    if (before >= 0) {
      const Turn turn = turn_of(before, a);
      mbarrier_wait(&empty[turn.barrier], turn.parity);
    }
    return &full[turn_of(j, a).barrier];
  }
  __device__ __forceinline__ void wait(int j, const Args& a) {
    const Turn turn = turn_of(j, a);
    mbarrier_wait(&full[turn.barrier], turn.parity);
  }
  // One thread, or as many as init was told, when its group has read tile j.
  __device__ __forceinline__ void release(int j, const Args& a) {
    mbarrier_arrive(&empty[turn_of(j, a).barrier]);
  }

 private:
  // A tile's barrier, j modulo their number, and the parity of its phase there.
  struct Turn {
    int barrier, parity;
  };
  __device__ __forceinline__ static Turn turn_of(int j, const Args& a) {
    int in_ring;
    const int rounds = a.by_stages.div(j / kGroups, in_ring);
    return {in_ring * kGroups + j % kGroups, rounds & 1};
  }
};

// Sets pitch, rows or images per tile and rows per copy for tiles of up to `pixels` positions;
// false where one row does not fit. Needs channels, taps, extents and padding; in_w, in_h: input
// extents; row_bytes: a channel block in shared memory.
inline bool set_tiles(Args& a, int in_w, int in_h, int pixels, int row_bytes) {
  // A row's right padding is the next row's left one; rows start at multiples of 128 bytes.
  const int align = 128 / row_bytes;
  a.pitch = std::max(in_w + a.pad_l, a.q + a.s - 1 - a.pad_l);
  a.pitch = (a.pitch + align - 1) / align * align;
  if (a.pitch > pixels) return false;
  a.image_rows = std::max(in_h + a.pad_t, a.p + a.r - 1 - a.pad_t);
  a.tile_images = std::min(pixels / (a.image_rows * a.pitch), a.images);
  if (a.tile_images > 1) {
    a.tile_rows = a.p;
    a.load_rows = a.image_rows;
    a.row_tiles = 1;
  } else {
    a.tile_images = 1;
    a.row_tiles = (a.p + pixels / a.pitch - 1) / (pixels / a.pitch);
    a.tile_rows = (a.p + a.row_tiles - 1) / a.row_tiles;
    a.load_rows = a.tile_rows + a.r - 1;
    a.image_rows = pixels;  // more rows than a tile has
  }
  const int64_t tiles = ceil_div(a.images, a.tile_images) * a.row_tiles;
  if (tiles > (1 << 30) || a.load_rows > 256) return false;
  a.tiles = static_cast<int>(tiles);
  a.plane_rows = std::max(a.load_rows * a.tile_images * a.pitch + a.pad_l,
                          pixels + (a.r - 1) * a.pitch + a.s - 1);
  return true;
}

// The same of a stripe of so many columns, where tiles are rows of one image.
inline bool set_stripe_tiles(Args& a, int columns, int in_h, int pixels, int row_bytes) {
  const int images = a.images, stripes = a.q / columns;
  a.stripes = stripes, a.q = columns, a.images = 1;
  // Of the input, less the padding.
  if (!set_tiles(a, columns + a.s - 1 - a.pad_l, in_h, pixels, row_bytes)) return false;
  const int64_t stripes_in_all = int64_t{images} * stripes, tiles = stripes_in_all * a.row_tiles;
  if (tiles > 1 << 30) return false;
  a.images = static_cast<int>(stripes_in_all), a.tiles = static_cast<int>(tiles);
  return true;
}

// Sets what set_tiles() sets and the stripes, with a.images and a.q those of whole images on entry.
// Tiles of few rows would read each row of the input several times, and those of wide images hold
// none: stripes then bring more rows, of the width for which cost(args) is the least.
template <typename Cost>
bool cut_into_tiles(Args& a, int in_w, int in_h, int pixels, int row_bytes, const Cost& cost) {
  constexpr int kFewRows = 4, kLeastColumns = 16;
  Args best = a;
  best.stripes = 1;
  bool found = set_tiles(best, in_w, in_h, pixels, row_bytes);
  const bool many_rows =
      found && (best.tile_images > 1 || best.tile_rows >= std::min(kFewRows, a.p));
  for (int stripes = 2; !many_rows && a.q / stripes >= kLeastColumns; ++stripes) {
    if (a.q % stripes > 0) continue;
    Args candidate = a;
    if (!set_stripe_tiles(candidate, a.q / stripes, in_h, pixels, row_bytes)) continue;
    if (!found || cost(candidate) < cost(best)) best = candidate, found = true;
  }
  a = best;
  return found;
}

// For cut_into_tiles(), of fprop and dgrad by tiles of `pixels` positions: each is multiplied, at
// about twice the cost of a position that is copied.
inline auto copied_and_multiplied(int pixels) {
  return [pixels](const Args& a) {
    return int64_t{a.tiles} * (a.load_rows * a.tile_images * a.pitch + 2 * pixels);
  };
}

// round_to_tf32: fp32 is rounded on the way.
inline CUtensorMapDataType tensor_map_type(DType dtype, bool round_to_tf32 = false) {
  return dtype == DType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
         : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
         : round_to_tf32            ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}
inline CUtensorMap tensor_map(DType dtype, const Tensor4dRef& t, int64_t c, int64_t w, int64_t h,
                              int64_t n, const uint32_t (&box)[4], int row_bytes,
                              bool round_to_tf32 = false) {
  const uint64_t size = size_of(dtype);
  return make_tensor_map(tensor_map_type(dtype, round_to_tf32), t.data,
                         {static_cast<uint64_t>(c), static_cast<uint64_t>(w),
                          static_cast<uint64_t>(h), static_cast<uint64_t>(n)},
                         {t.w * size, t.h * size, t.n * size}, box, row_bytes);
}

// What all of them ask of a problem.
inline bool takes(const Conv2dShape& s) {
  return s.dtype != DType::kFloat64 && s.groups == 1 && s.stride_h == 1 && s.stride_w == 1 &&
         s.dilation_h == 1 && s.dilation_w == 1 && s.pad_h < s.r && s.pad_w < s.s && s.n > 0 &&
         has_wgmma();
}

// TMA: channels innermost, the other strides multiples of 16 bytes.
inline bool tma_takes(DType dtype, const Tensor4dRef& t) {
  const int64_t size = size_of(dtype);
  return t.c == 1 && t.w * size % 16 == 0 && t.h * size % 16 == 0 && t.n * size % 16 == 0 &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

}  // namespace braze::cuda::halo
