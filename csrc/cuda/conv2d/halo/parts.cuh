// What the halo kernels are made of, but for products and stores: where a tile lies; for fprop and
// dgrad, where its outputs go, zeros around what is copied, the producer's copies, the split into
// parts.
#pragma once

#include "split.cuh"
#include "tiles.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"

namespace braze::cuda::halo {

// Images of a tile, from `image` on, or rows of it or of a stripe of it. The last tiles may have
// fewer outputs.
struct TilePlace {
  int image, stripe, first_row, rows_left, images_left;
};
__device__ __forceinline__ TilePlace place_of(const Args& a, int tile) {
  int row_tile, stripe;
  const int number = a.by_row_tiles.div(tile, row_tile) * a.tile_images;
  const int image = a.by_stripes.div(number, stripe), first_row = row_tile * a.tile_rows;
  return {image, stripe, first_row, min(a.tile_rows, a.p - first_row),
          min(a.tile_images, a.images - number)};
}

// Where the tile's first output is, in elements behind the first one of all.
__device__ __forceinline__ int64_t first_output(const Args& a, const TilePlace& place) {
  return place.image * a.y_n + place.first_row * a.y_h + place.stripe * a.q * a.y_w;
}

// Of a position's output in its tile, or -1 where it is none.
__device__ __forceinline__ int output_offset(const Args& a, int position, int rows_left,
                                             int images_left) {
  int column, p;
  const int tile_image = a.by_image_rows.div(a.by_pitch.div(position, column), p);
  const bool inside = column < a.q && p < rows_left && tile_image < images_left;
  return inside ? static_cast<int>(tile_image * a.y_n + p * a.y_h + column * a.y_w) : -1;
}

// Zeros where no copy writes but a shifted read may go: behind the `loaded` rows of each plane.
template <int kRowBytes>
__device__ __forceinline__ void zero_behind(int loaded, unsigned char* planes, int count,
                                            int plane_bytes, int warps) {
  for (int plane = threadIdx.x / 32; plane < count; plane += warps) {
    for (int i = loaded * kRowBytes + threadIdx.x % 32 * 16; i < plane_bytes; i += 32 * 16) {
      *reinterpret_cast<uint4*>(planes + plane * plane_bytes + i) = uint4{0, 0, 0, 0};
    }
  }
}

// One thread has the inputs of a tile copied to `stage`: `blocks` of kChannels channels from
// `first_block` on, a plane each.
template <int kChannels>
__device__ __forceinline__ void copy_tile(const CUtensorMap* map, uint64_t* full,
                                          unsigned char* stage, const Args& a, int tile, int blocks,
                                          int plane_bytes, int first_block = 0) {
  const TilePlace place = place_of(a, tile);
  for (int block = 0; block < blocks; ++block) {
    tma_load_4d(map, full, shared_address(stage + block * plane_bytes),
                (first_block + block) * kChannels, place.stripe * a.q - a.pad_l,
                place.first_row - a.pad_t, place.image);
  }
}

// How a tile lies in shared memory: as it was loaded, and in kPlanes parts for each channel block.
struct SplitLayout {
  int blocks, loaded;                    // channel blocks of parts; rows of each
  int raw_block_bytes, raw_plane_bytes;  // loaded
  int plane_bytes;                       // of a part
};

// The 128 threads of a group split tile j into parts, after which its stage is free. special:
// whether it has infinities or NaN; two tiles in turn.
template <int kPlanes, int kRowBytes, int kGroups>
__device__ __forceinline__ void split_tile(TileRing<kGroups>& ring, int j, const Args& a,
                                           const unsigned char* raw, unsigned char* parts,
                                           const SplitLayout& l, int barrier, int (&special)[2],
                                           int turn) {
  const int thread = threadIdx.x % 128;
  for (int block = 0; block < l.blocks; ++block) {
    if (split_rows<kPlanes, kRowBytes>(raw + block * l.raw_block_bytes, l.raw_plane_bytes,
                                       parts + block * kPlanes * l.plane_bytes, l.plane_bytes,
                                       l.loaded, thread, 128)) {
      special[turn] = 1;
    }
  }
  fence_async_proxy();
  named_barrier(barrier, 128);  // split in full, and the stage is free
  if (thread == 0) {
    ring.release(j, a);
    special[turn ^ 1] = 0;
  }
}

}  // namespace braze::cuda::halo
