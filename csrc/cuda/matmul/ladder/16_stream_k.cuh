// Rung 16: stream-K (Osama et al., arXiv 2301.03598). Where tiles do not fill the last wave, or are
// fewer than the multiprocessors, the depths of all of them are laid end to end and cut into equal
// shares, so that every cluster multiplies for as long as any other, wherever tiles begin and end.
//
// Few tiles are cut into as many parts each, all at the same depths, where that leaves few clusters
// without work: what several tiles read is then read at the same time, and comes from memory once.
//
// With more tiles than clusters only the last wave and the one before are cut; the others are left
// whole. A cluster whose share ends inside a tile leaves its sums in the workspace, where a second
// kernel finds all of a tile's, adds them up in the order of the depth, and finishes the tile: the
// same every time. That costs a launch and two trips of at most two tiles a cluster to L2; against
// a split of every tile into as many parts it evens out what does not divide.
#pragma once

#include <algorithm>

#include "13_persistent.cuh"
#include "cuda/matmul/hopper/turn_columns.cuh"

namespace braze::cuda::hopper {

struct StreamArgs : Args {
  int clusters;       // that share the work
  int stream_tiles;   // the first ones, whose depths are shared out; the others are taken whole
  int splits;         // or each tile is cut into so many shares, none of two tiles; else 0
  int share, longer;  // stages of each share; the first `longer` ones, of a tile, have one more
  // What is divided by: a tile's stages and shares, the stages of a share, longer or not. (Clusters
  // that divide by the numbers themselves begin half a microsecond later.)
  FastDiv by_stages, by_splits, by_share, by_longer_share;
  float4* parts;  // [cluster][2][rank][piece of a thread's sums][thread]

  // Shares all stages of `count` tiles out, or cuts each tile.
  void set_shares(int count, int cuts, int resident) {
    stream_tiles = count, splits = cuts;
    const int stages = splits ? depth_tiles : count * depth_tiles;
    clusters = splits ? splits * tiles : std::min(resident, count ? stages : tiles);
    const int shares = splits ? splits : clusters;
    share = stages / shares, longer = stages % shares;
    by_stages = FastDiv(depth_tiles), by_splits = FastDiv(splits);
    by_share = FastDiv(share), by_longer_share = FastDiv(share + 1);
  }
};

template <typename T, int kRows, int kColumns, int kStages, int kCluster>
struct StreamTile : Tile<T, kRows, kColumns, kStages, kCluster, kRows / 64> {
  static constexpr int kConsumerThreads = StreamTile::kConsumers * 128;
  static constexpr int kPieces = StreamTile::kBlocks * kColumns / 8;  // of a thread, 4 sums each
};

// The first stage, of those that are shared out, of cluster c's share; and whose share a stage is.
__device__ __forceinline__ int share_begin(const StreamArgs& a, int c) {
  int tile = 0, part = c;
  if (a.splits > 0) tile = a.by_splits.div(c, part);
  return tile * a.depth_tiles + a.share * part + min(part, a.longer);
}
__device__ __forceinline__ int share_of(const StreamArgs& a, int stage) {
  if (a.splits > 0) {  // asked for a tile's first and last stage only
    int in_tile;
    const int tile = a.by_stages.div(stage, in_tile);
    return tile * a.splits + (in_tile == 0 ? 0 : a.splits - 1);
  }
  const int in_longer = a.longer * (a.share + 1);
  if (stage < in_longer) return a.by_longer_share.div(stage);
  return a.longer + a.by_share.div(stage - in_longer);
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
      tile = a.by_stages.div(at, first);
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

// Of 8 columns from `column` on in 16 rows from `row` on, whether some are the product's: the
// others' sums, of tiles at its edges, are not worth their way through memory.
__device__ __forceinline__ bool is_inside(const StreamArgs& a, int row, int column) {
  return row < a.rows && column < a.columns;
}

// How many boxes of a stage, of operands that both lie across the depth, are the product's. Others,
// of tiles at its edges, are not loaded, and what is summed in their place is not stored.
template <typename Tile>
struct BoxesInside {
  static constexpr int kWidth = kSwizzle / int{sizeof(typename Tile::T)};
  static constexpr int kBytes = Tile::kDepth * kSwizzle;  // of a box
  int rows, columns;

  __device__ __forceinline__ BoxesInside(const Args& a, int row, int column)
      : rows(within(a.rows - row, Tile::kRows)),
        columns(within(a.columns - column, Tile::kColumns)) {}
  __device__ __forceinline__ uint32_t bytes() const { return (rows + columns) * kBytes; }
  // The rows' boxes from `row` on, at `depth`, to shared memory.
  __device__ __forceinline__ void load_rows(const CUtensorMap* map, uint64_t* full, uint32_t to,
                                            int row, int depth, int batch) const {
#pragma unroll
    for (int i = 0; i < Tile::kRows / kWidth; ++i) {
      if (i >= rows) break;
      load<typename Tile::T, 1, kWidth, 1>(map, full, to + i * kBytes, row + i * kWidth, depth,
                                           batch);
    }
  }

 private:
  __device__ static int within(int count, int most) {
    return (min(max(count, 0), most) + kWidth - 1) / kWidth;
  }
};

template <typename Tile>
class Copies<StreamArgs, Tile, 1, 1> : public Copies<Args, Tile, 1, 1> {
 public:
  __device__ __forceinline__ Copies(const CUtensorMap* row_map, const CUtensorMap* column_map,
                                    const StreamArgs& a, const Place& p, int rank)
      : Copies<Args, Tile, 1, 1>(row_map, column_map, a, p, rank),
        inside_(a, this->row_, this->column_) {}

  __device__ __forceinline__ uint32_t bytes() const { return inside_.bytes(); }
  __device__ __forceinline__ void copy(int d, uint64_t* full, uint32_t to) {
    using T = typename Tile::T;
    constexpr int kWidth = BoxesInside<Tile>::kWidth;
    const int depth = d * Tile::kDepth;
    inside_.load_rows(this->row_map_, full, to, this->row_, depth, this->row_batch_);
    for_column_boxes<Tile>(this->rank_, to, [&](int first, uint32_t box) {
#pragma unroll
      for (int i = 0; i < Tile::kColumnBox / kWidth; ++i) {
        if (first / kWidth + i >= inside_.columns) break;
        load<T, 1, kWidth, Tile::kCluster>(
            this->column_map_, full, box + i * BoxesInside<Tile>::kBytes,
            this->column_ + first + i * kWidth, depth, this->column_batch_);
      }
    });
  }

 private:
  BoxesInside<Tile> inside_;
};

template <typename Tile, int kRowMajor, int kColumnMajor, bool kSwap>
__device__ __forceinline__ void consume_share(const CUtensorMap* c_map, const StreamArgs& a,
                                              int cluster, int rank, uint32_t stages, Ring ring) {
  using T = typename Tile::T;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const uint32_t staging = stages + Tile::kStages * Tile::kStageBytes + group * Tile::kStagingBytes;
  Cursor<Tile::kStages> at;
  float acc[Tile::kBlocks][Tile::kColumns / 2];
  for_share(a, cluster, [&](const Place& p, int part) {
    const int last =
        multiply_depths<Tile, kRowMajor, kColumnMajor>(a, acc, at, stages, ring, p.first, p.last);
    release_stage<Tile>(ring.empty, last);

    const int tile_row = (p.row * Tile::kCluster + rank) * Tile::kRows + group * Tile::kBlocks * 64;
    const int tile_column = p.column * Tile::kColumns;
    if (part >= 0) {
      float4* const to =
          a.parts + int64_t{part * Tile::kCluster + rank} * Tile::kPieces * Tile::kConsumerThreads +
          threadIdx.x;
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < Tile::kColumns / 8; ++i) {
          if (!is_inside(a, tile_row + b * 64 + thread / 32 * 16, tile_column + i * 8)) continue;
          const float* const v = &acc[b][4 * i];
          to[(b * (Tile::kColumns / 8) + i) * Tile::kConsumerThreads] =
              make_float4(v[0], v[1], v[2], v[3]);
        }
      }
      return;
    }
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
  constexpr bool kTurned = are_turned<typename Tile::T, kColumnMajor>;
  __shared__ uint64_t turned[kTurned ? Tile::kStages : 1];
  if constexpr (kTurned) start_turning<Tile>(turned);
  const uint32_t stages = (shared_address(shared_bytes) + 1023) & ~1023u;
  start_ring<Tile>(&row_map, &column_map, full, empty);
  const int cluster = blockIdx.x / kCluster;
  const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  if (threadIdx.x / 128 == Tile::kConsumers) {
    if constexpr (Tile::kConsumers == 2) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kTurned ? 56 : 40));
    }
    if (threadIdx.x % 128 == 0) {
      Cursor<Tile::kStages> at;
      for_share(a, cluster, [&](const Place& p, int) {
        Copies<A, Tile, kRowMajor, kColumnMajor> copies(&row_map, &column_map, a, p, rank);
#pragma unroll 1
        for (int d = p.first; d < p.last; ++d, at.next()) {
          mbarrier_wait(&empty[at.stage], at.phase ^ 1);
          mbarrier_expect(&full[at.stage], copies.bytes());
          copies.copy(d, &full[at.stage], stages + at.stage * Tile::kStageBytes);
        }
      });
      drain_ring<Tile>(empty, at);
    }
    if constexpr (kTurned) {
      if (threadIdx.x % 128 >= 32) {
        const Turn turn = turn_of_lane();
        Cursor<Tile::kStages> at;
        for_share(a, cluster, [&](const Place& p, int) {
#pragma unroll 1
          for (int d = p.first; d < p.last; ++d, at.next()) {
            mbarrier_wait(&full[at.stage], at.phase);
            turn_columns<Tile>(stages + at.stage * Tile::kStageBytes + Tile::kRowBytes,
                               a.columns - p.column * Tile::kColumns, turn, &turned[at.stage]);
          }
        });
      }
    }
    __syncwarp();
  } else {
    if constexpr (Tile::kConsumers == 2) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kTurned ? 224 : 232));
    }
    consume_share<Tile, kRowMajor, kColumnMajor, kSwap>(&c_map, a, cluster, rank, stages,
                                                        {full, empty, turned});
  }
#endif
}

template <typename Tile, int kGroups>
constexpr int kSumThreads = kGroups == 1 ? Tile::kConsumerThreads : 256;

// Finishes the tiles that were shared out: blockIdx.x is tile and rank, blockIdx.y the piece and,
// of the consumers' threads, which. Of a tile of many parts `kGroups` groups of threads add up a
// run of them each: one thread would wait for memory too often.
template <typename Tile, bool kSwap, int kGroups>
__global__ void __launch_bounds__(kSumThreads<Tile, kGroups>)
    stream_k_sum_kernel(const StreamArgs a) {
  using T = typename Tile::T;
  constexpr int kWidth = kSumThreads<Tile, kGroups> / kGroups,
                kBlocks = Tile::kConsumerThreads / kWidth;
  static_assert(kWidth % 32 == 0 && kBlocks * kWidth == Tile::kConsumerThreads);
  const int tile = blockIdx.x / Tile::kCluster, rank = blockIdx.x % Tile::kCluster;
  const int piece = blockIdx.y / kBlocks, of_group = threadIdx.x / kWidth;
  const int thread = blockIdx.y % kBlocks * kWidth + threadIdx.x % kWidth;  // the consumer's
  const int first_stage = tile * a.depth_tiles;
  const int first = share_of(a, first_stage), last = share_of(a, first_stage + a.depth_tiles - 1);
  const Place p = place_of(a, tile);
  const int group = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const int block = piece / (Tile::kColumns / 8), chunk = piece % (Tile::kColumns / 8);
  const int row = (p.row * Tile::kCluster + rank) * Tile::kRows +
                  (group * Tile::kBlocks + block) * 64 + warp * 16;
  const int column = p.column * Tile::kColumns + chunk * 8;
  wait_for_earlier_kernels();
  if (first == last) return;  // one cluster had all of it
  const bool inside = is_inside(a, row, column);
  const int count = last - first + 1;
  float sum[4] = {};
  if (inside) {
    const int end = count * (of_group + 1) / kGroups;
#pragma unroll kGroups == 1 ? 4 : 8
    for (int i = count * of_group / kGroups; i < end; ++i) {
      const int part = 2 * (first + i) + (i == 0);
      const int64_t at = int64_t{part * Tile::kCluster + rank} * Tile::kPieces + piece;
      const float4 v = a.parts[at * Tile::kConsumerThreads + thread];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  }
  if constexpr (kGroups > 1) {
    __shared__ float4 sums[kGroups][kWidth];
    sums[of_group][threadIdx.x % kWidth] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (of_group > 0) return;
#pragma unroll
    for (int g = 1; g < kGroups; ++g) {
      const float4 v = sums[g][threadIdx.x];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  }
  if (!inside) return;
  const int of_lane = lane / 4, pair = lane % 4 * 2;
  finish<T, kSwap>(a, sum, row + of_lane, column + pair);
  store_direct<T, kSwap>(static_cast<T*>(a.c) + p.batch * a.c_batch, a.c_ld, a.rows, a.columns, sum,
                         row + of_lane, column + pair);
}

}  // namespace braze::cuda::hopper
