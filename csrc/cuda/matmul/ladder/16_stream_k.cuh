// Rung 16: stream-K (Osama et al., arXiv 2301.03598). Where tiles do not fill the last wave, or are
// fewer than the multiprocessors, the depths of all of them are laid end to end and cut into equal
// shares, so that every cluster multiplies for as long as any other, wherever tiles begin and end.
//
// With more tiles than clusters only the last wave and the one before are cut; the others are left
// whole. A cluster whose share ends inside a tile leaves its sums in the workspace, where a second
// kernel finds all of a tile's, adds them up in the order of the depth, and finishes the tile: the
// same every time. That costs a launch and two trips of at most two tiles a cluster to L2; against
// a split of every tile into as many parts it evens out what does not divide.
#pragma once

#include "13_persistent.cuh"

namespace braze::cuda::hopper {

struct StreamArgs : Args {
  int clusters;       // that share the work
  int stream_tiles;   // the first ones, whose depths are shared out; the others are taken whole
  int share, longer;  // stages of each share; the first `longer` ones have one more
  float4* parts;      // [cluster][2][rank][piece of a thread's sums][thread]
};

template <typename T, int kRows, int kColumns, int kStages, int kCluster>
struct StreamTile : Tile<T, kRows, kColumns, kStages, kCluster> {
  static constexpr int kConsumerThreads = StreamTile::kConsumers * 128;
  static constexpr int kPieces = StreamTile::kBlocks * kColumns / 8;  // of a thread, 4 sums each
};

// The first stage, of those that are shared out, of cluster c's share; and whose share a stage is.
__device__ __forceinline__ int share_begin(const StreamArgs& a, int c) {
  return a.share * c + min(c, a.longer);
}
__device__ __forceinline__ int share_of(const StreamArgs& a, int stage) {
  const int in_longer = a.longer * (a.share + 1);
  return stage < in_longer ? stage / (a.share + 1) : a.longer + (stage - in_longer) / a.share;
}

// Calls f(place, part) for all that the cluster works on. part: where its sums go, or -1 for a
// whole tile. A tile's first part is the last of its cluster's share, all others are the first.
template <typename F>
__device__ __forceinline__ void for_share(const StreamArgs& a, int cluster, F&& f) {
  int at = share_begin(a, cluster), whole_tile = a.stream_tiles + cluster;
  const int end = share_begin(a, cluster + 1);
  while (true) {  // one loop, and so one copy of f, for both kinds: code comes from memory, too
    int tile = whole_tile, first = 0, last = a.depth_tiles;
    if (at < end) {
      tile = at / a.depth_tiles;
      first = at - tile * a.depth_tiles;
      last = min(last, first + end - at);
      at += last - first;
    } else {
      if (tile >= a.tiles) return;
      whole_tile += a.clusters;
    }
    Place p = place_of(a, tile);
    p.first = first, p.last = last;
    f(p, last - first == a.depth_tiles ? -1 : 2 * cluster + (first == 0));
  }
}

template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap>
__device__ __forceinline__ void consume_share(const CUtensorMap* c_map, const StreamArgs& a,
                                              int cluster, int rank, uint32_t stages,
                                              uint64_t* full, uint64_t* empty) {
  using T = typename Tile::T;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const uint32_t staging = stages + Tile::kStages * Tile::kStageBytes + group * Tile::kStagingBytes;
  Cursor<Tile::kStages> at;
  float acc[Tile::kBlocks][Tile::kColumns / 2];
  for_share(a, cluster, [&](const Place& p, int part) {
    const int last = multiply_depths<Tile, kRowMajor, kColumnMajor>(acc, at, stages, full, empty,
                                                                    p.first, p.last);
    release_stage<Tile>(empty, last);

    if (part >= 0) {
      float4* const to =
          a.parts + int64_t{part * Tile::kCluster + rank} * Tile::kPieces * Tile::kConsumerThreads +
          threadIdx.x;
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < Tile::kColumns / 8; ++i) {
          const float* const v = &acc[b][4 * i];
          to[(b * (Tile::kColumns / 8) + i) * Tile::kConsumerThreads] =
              make_float4(v[0], v[1], v[2], v[3]);
        }
      }
      return;
    }
    const int tile_row = (p.row * Tile::kCluster + rank) * Tile::kRows + group * Tile::kBlocks * 64;
    const int tile_column = p.column * Tile::kColumns;
    const int row = tile_row + thread / 32 * 16 + lane / 4, column = tile_column + lane % 4 * 2;
#pragma unroll
    for (int b = 0; b < Tile::kBlocks; ++b) {
      finish<T, kSwap>(a, acc[b], row + b * 64, column);
      if constexpr (Tile::kStaged) {
        if (!a.direct) {
          Finished<Tile> finished;
          finished.take(acc[b], tile_row + b * 64, tile_column, p.batch);
          finished.template flush<kSwap>(a, c_map, staging, group);
          continue;
        }
      }
      store_direct<T, kSwap>(static_cast<T*>(a.c) + p.batch * a.c_batch, a.c_ld, a.rows, a.columns,
                             acc[b], row + b * 64, column);
    }
  });
  if constexpr (Tile::kStaged) {
    if (thread == 0) tma_store_wait_read<0>();
  }
}

// A: StreamArgs or, of a kernel with Copies of its own, what is made from it.
template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap, typename A = StreamArgs>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    stream_k_kernel(const __grid_constant__ CUtensorMap row_map,
                    const __grid_constant__ CUtensorMap column_map,
                    const __grid_constant__ CUtensorMap c_map, const A a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // other architectures get a kernel that nobody launches
  constexpr int kCluster = Tile::kCluster;
  extern __shared__ unsigned char shared_bytes[];
  __shared__ uint64_t full[Tile::kStages], empty[Tile::kStages];
  const uint32_t stages = (shared_address(shared_bytes) + 1023) & ~1023u;
  start_ring<Tile>(&row_map, &column_map, full, empty);
  const int cluster = blockIdx.x / kCluster;
  const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  if (threadIdx.x / 128 == Tile::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 128 == 0) {
      Cursor<Tile::kStages> at;
      for_share(a, cluster, [&](const Place& p, int) {
        Copies<A, Tile, kRowMajor, kColumnMajor> copies(&row_map, &column_map, a, p, rank);
#pragma unroll 1
        for (int d = p.first; d < p.last; ++d, at.next()) {
          mbarrier_wait(&empty[at.stage], at.phase ^ 1);
          mbarrier_expect(&full[at.stage], Tile::kStageBytes);
          copies.copy(d, &full[at.stage], stages + at.stage * Tile::kStageBytes);
        }
      });
      drain_ring<Tile>(empty, at);
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume_share<Tile, kRowMajor, kColumnMajor, kSwap>(&c_map, a, cluster, rank, stages, full,
                                                        empty);
  }
#endif
}

// Finishes the tiles that were shared out: blockIdx.x is tile and rank, blockIdx.y the piece.
template <typename Tile, bool kSwap>
__global__ void __launch_bounds__(Tile::kConsumerThreads) stream_k_sum_kernel(const StreamArgs a) {
  using T = typename Tile::T;
  const int tile = blockIdx.x / Tile::kCluster, rank = blockIdx.x % Tile::kCluster;
  const int first_stage = tile * a.depth_tiles;
  const int first = share_of(a, first_stage), last = share_of(a, first_stage + a.depth_tiles - 1);
  wait_for_earlier_kernels();
  if (first == last) return;  // one cluster had all of it
  const auto part = [&](int number) {
    const int64_t at = int64_t{number * Tile::kCluster + rank} * Tile::kPieces + blockIdx.y;
    return a.parts[at * Tile::kConsumerThreads + threadIdx.x];
  };
  const float4 begin = part(2 * first + 1);
  float sum[4] = {begin.x, begin.y, begin.z, begin.w};
#pragma unroll 4
  for (int c = first + 1; c <= last; ++c) {
    const float4 v = part(2 * c);
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
  const Place p = place_of(a, tile);
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.y / (Tile::kColumns / 8), chunk = blockIdx.y % (Tile::kColumns / 8);
  const int row = (p.row * Tile::kCluster + rank) * Tile::kRows +
                  (group * Tile::kBlocks + block) * 64 + warp * 16 + lane / 4;
  const int column = p.column * Tile::kColumns + chunk * 8 + lane % 4 * 2;
  finish<T, kSwap>(a, sum, row, column);
  store_direct<T, kSwap>(static_cast<T*>(a.c) + p.batch * a.c_batch, a.c_ld, a.rows, a.columns, sum,
                         row, column);
}

}  // namespace braze::cuda::hopper
