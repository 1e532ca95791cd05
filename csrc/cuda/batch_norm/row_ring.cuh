// How a block of one kernel walks through its part of the rows of [rows, c] twice, forwards and
// then backwards. The copy engine brings the rows to slots of shared memory ahead of the threads.
// What the way forwards read last is still in the slots when the way back begins: 200 KB for each
// multiprocessor are read once, and what is asked for next the cache may have. (Blocks that on the
// way back took whatever rows were left were slower: other multiprocessors' are in the cache's
// other half.)
#pragma once

#include <numeric>

#include "cuda/common/tma.cuh"
#include "rows.cuh"

namespace braze::cuda {

constexpr int kRingThreads = 512;
constexpr int kLeastSlots = 2, kMostSlots = 32;
constexpr int kVectorBytes = 16;

struct RingPlan {
  int64_t rows;
  int vectors;     // of a row
  int height;      // rows that are worked on side by side
  int threads;     // whole warps
  int parts;       // blocks
  int stage_rows;  // of a slot
  int slots;
  int tensors;  // that a slot has rows of

  __host__ __device__ int stage_bytes() const { return stage_rows * vectors * kVectorBytes; }
  __host__ __device__ int ring_bytes() const { return slots * tensors * stage_bytes(); }
  // Of tree_sums behind the ring, for two 32-bit values of each of 8 channels at most.
  int sum_bytes() const { return height / 2 * vectors * 2 * 8 * 4; }
  int shared_bytes() const { return ring_bytes() + sum_bytes(); }

  // Parts begin with a cache line, and slots as well: at rows that are multiples of `unit`. The
  // last `longer` parts have a unit more than the others. Here without a division.
  int unit, longer;
  int64_t least;  // units
  __host__ __device__ __forceinline__ int64_t begin_of(int part) const {
    const int more = part - (parts - longer);
    return (part * least + (more > 0 ? more : 0)) * unit;
  }
  __host__ __device__ __forceinline__ int rows_of(int part) const {
    const int64_t most = (least + (part >= parts - longer)) * unit, left = rows - begin_of(part);
    return static_cast<int>(most < left ? most : left);
  }
};

// At most kRingThreads vectors in a row. per_thread: vectors of each tensor in a slot.
inline RingPlan plan_ring(int64_t rows, int64_t vectors, int tensors, int per_thread) {
  RingPlan plan{};
  plan.rows = rows;
  plan.vectors = static_cast<int>(vectors);
  constexpr int kLineBytes = 128;
  plan.unit = kLineBytes / std::gcd(kLineBytes, plan.vectors * kVectorBytes);
  plan.height = kRingThreads / plan.vectors;
  const int even = plan.unit / std::gcd(plan.unit, per_thread);
  if (plan.height > even) plan.height -= plan.height % even;
  plan.threads = static_cast<int>(ceil_div(plan.height * plan.vectors, 32)) * 32;
  const int64_t units = ceil_div(rows, plan.unit);
  plan.parts = static_cast<int>(std::min<int64_t>(units, sm_count()));
  plan.least = units / plan.parts;
  plan.longer = static_cast<int>(units - plan.least * plan.parts);
  plan.stage_rows = per_thread * plan.height;
  plan.tensors = tensors;
  constexpr int kStatic = 4 << 10;  // of the kernels
  const int room = most_shared_memory() - kStatic - plan.sum_bytes();
  plan.slots = std::min(room / (tensors * plan.stage_bytes()), kMostSlots);
  return plan;
}

// Rows in a slot.
struct RingRows {
  int64_t first;  // vector of the tensor
  int count;
  int slot;
};

struct RingSlots {
  uint64_t full[kMostSlots];  // barriers
  int taken[kMostSlots];      // warps that need the rows no more
};

// Adds to a counter in shared memory and returns what it was; what the thread read and wrote before
// is done for whoever sees it.
__device__ __forceinline__ int add_shared(int* counter, int v) {
  int old;
  asm volatile("atom.acq_rel.cta.shared::cta.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(shared_address(counter)), "r"(v)
               : "memory");
  return old;
}

// Beside the ring's tensors a walk may need others: side.load(rows) asks for what belongs to rows,
// and side.take() makes the last load's results those that are worked with.
struct NoSide {
  __device__ __forceinline__ void load(const RingRows&) {}
  __device__ __forceinline__ void take() {}
};

template <typename T, int kTensors>
class RowRing {
 public:
  using Sources = const T* const (&)[kTensors];

  // Every thread of the block calls it.
  __device__ RowRing(const RingPlan& plan, unsigned char* shared, RingSlots& slots, Sources from)
      : plan_(plan), shared_(shared), slots_(slots) {
    const int part = static_cast<int>(blockIdx.x);
    begin_ = plan.begin_of(part) * plan.vectors;
    rows_ = plan.rows_of(part);
    stages_ = (rows_ + plan.stage_rows - 1) / plan.stage_rows;
    used_ = min(plan.slots, stages_);
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < used_; ++slot) {
        mbarrier_init(&slots.full[slot], 1);
        slots.taken[slot] = 0;
      }
      mbarrier_init_fence();
      for (int slot = 0; slot < used_; ++slot) ask(rows(slot, slot), from);
    }
    __syncthreads();
  }

  // A tensor's vectors of a slot.
  __device__ __forceinline__ T* vectors(int slot, int tensor) const {
    return reinterpret_cast<T*>(shared_ + (slot * kTensors + tensor) * plan_.stage_bytes());
  }

  // use(rows) for all of the block's rows, when they are there. All threads of the block.
  template <typename Side, typename Use>
  __device__ __forceinline__ void walk_forwards(Sources from, Side& side, const Use& use) const {
    RingRows now = rows(0, 0);
    side.load(now);
    for (int stage = 0, number = 0; stage < stages_; ++stage) {
      const RingRows next = rows(stage + 1, now.slot + 1 == used_ ? 0 : now.slot + 1);
      const int again = stage + used_;
      visit(now, number, stage + 1 < stages_, next, again < stages_ ? again : -1, from, side, use);
      number += next.slot == 0;
      now = next;
    }
  }

  // The same after walk_forwards and a barrier for the block. A slot's fills are numbered on.
  template <typename Side, typename Use>
  __device__ __forceinline__ void walk_backwards(Sources from, Side& side, const Use& use) const {
    const int last = stages_ - 1, round = last / used_, end = last - round * used_;
    RingRows now = rows(last, end);
    side.load(now);
    for (int stage = last, visits = 0; stage >= 0; --stage) {
      const RingRows next = rows(stage - 1, now.slot == 0 ? used_ - 1 : now.slot - 1);
      const int number = round - (now.slot > end ? 1 : 0) + visits;
      visit(now, number, stage > 0, next, stage - used_, from, side, use);
      visits += next.slot == end;
      now = next;
    }
  }

 private:
  __device__ __forceinline__ RingRows rows(int stage, int slot) const {
    const int from = stage * plan_.stage_rows;
    return {begin_ + int64_t{from} * plan_.vectors, min(plan_.stage_rows, rows_ - from), slot};
  }

  // again: the stage that the slot is for afterwards; negative: none.
  template <typename Side, typename Use>
  __device__ __forceinline__ void visit(const RingRows& now, int number, bool has_next,
                                        const RingRows& next, int again, Sources from, Side& side,
                                        const Use& use) const {
    side.take();
    if (has_next) side.load(next);
    mbarrier_wait(&slots_.full[now.slot], number & 1);
    use(now);
    if (again < 0) return;
    // The last warp asks for the next rows of the slot.
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    if (add_shared(&slots_.taken[now.slot], 1) < static_cast<int>(blockDim.x) / 32 - 1) return;
    slots_.taken[now.slot] = 0;
    ask(rows(again, now.slot), from);
  }

  __device__ __forceinline__ void ask(const RingRows& rows, Sources from) const {
    uint64_t* const full = &slots_.full[rows.slot];
    const uint32_t bytes = rows.count * plan_.vectors * kVectorBytes;
    const int64_t offset = rows.first * (kVectorBytes / int{sizeof(T)});
    mbarrier_expect(full, kTensors * bytes);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      tma_load_bytes(full, shared_address(vectors(rows.slot, t)), from[t] + offset, bytes);
    }
  }

  const RingPlan& plan_;
  unsigned char* shared_;
  RingSlots& slots_;
  int64_t begin_;      // the part's first vector
  int rows_, stages_;  // of the part
  int used_;           // slots
};

// Where a thread stands.
struct RingWorker {
  int line, column;
  bool works;

  __device__ explicit RingWorker(const RingPlan& plan)
      : line(static_cast<int>(threadIdx.x) / plan.vectors),
        column(static_cast<int>(threadIdx.x) - line * plan.vectors),
        works(line < plan.height) {}

  // f(u, vector) for kCount vectors of a slot's, of which some may be another thread's: to load,
  // and to write what both write alike.
  template <int kCount, typename F>
  __device__ __forceinline__ void each_slot(const RingPlan& plan, int rows, const F& f) const {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      f(u, min(line + u * plan.height, rows - 1) * plan.vectors + column);
    }
  }
  // The same without the others. In a full slot there are none: no branch is between the vectors.
  template <int kCount, typename F>
  __device__ __forceinline__ void each(const RingPlan& plan, int rows, const F& f) const {
    if (!works) return;
    if (rows == kCount * plan.height) return each_slot<kCount>(plan, rows, f);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const int row = line + u * plan.height;
      if (row < rows) f(u, row * plan.vectors + column);
    }
  }
};

// A thread's vectors of a slot.
template <typename T, int N, int kCount>
struct StageVectors {
  Packed<T, N> v[kCount];

  // from: of the first row.
  __device__ __forceinline__ void load(const RingPlan& plan, const RingWorker& me, int rows,
                                       const T* from) {
    me.template each_slot<kCount>(plan, rows,
                                  [&](int u, int vector) { v[u].load(from + vector * N); });
  }
};

// What the blocks leave for each other: kCount values for each channel, [value][block][channel].
template <int kCount>
struct RingPartials {
  float* data;
  int64_t channels;

  __device__ __forceinline__ float* at(int value, int block, int64_t channel) const {
    return data + (int64_t{value} * gridDim.x + block) * channels + channel;
  }
  template <int N>
  __device__ __forceinline__ void store(int value, int64_t channel, const float* v) const {
    Vec<float, N> all;
#pragma unroll
    for (int k = 0; k < N; ++k) all.v[k] = v[k];
    store_vec(at(value, blockIdx.x, channel), all);
  }
};

// Channels that a block merges at a time: the floats of a sector of memory.
constexpr int kMergeChannels = 8;

// Merges the blocks' partial results. All threads of the grid call it, in blocks of whole warps:
// add(channel, sums, values, block) adds a block's kCount values to two sums, and finish(channel,
// sums, load(channel)) gets their totals in one thread for each channel. The order is fixed.
template <int kCount, typename Load, typename Add, typename Finish>
__device__ void merge_ring(const RingPartials<kCount>& partials, const Load& load, const Add& add,
                           const Finish& finish) {
  __shared__ double totals[kRingThreads / 32][2][kMergeChannels];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32, parts = static_cast<int>(gridDim.x);
  const int team = static_cast<int>(threadIdx.x) / kMergeChannels;
  const int teams = static_cast<int>(blockDim.x) / kMergeChannels;
  for (int64_t begin = int64_t{blockIdx.x} * kMergeChannels; begin < partials.channels;
       begin += int64_t{gridDim.x} * kMergeChannels) {
    const int64_t channel = begin + lane % kMergeChannels;
    const auto loaded = load(min(channel, partials.channels - 1));
    double sums[2] = {0, 0};
    constexpr int kAtOnce = 3;
    for (int part = team; part < parts && channel < partials.channels; part += teams * kAtOnce) {
      float v[kAtOnce][kCount];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int block = min(part + u * teams, parts - 1);
#pragma unroll
        for (int j = 0; j < kCount; ++j) v[u][j] = *partials.at(j, block, channel);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (part + u * teams < parts) add(channel, sums, v[u], part + u * teams);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      for (int offset = kMergeChannels; offset < 32; offset *= 2) {
        sums[j] += __shfl_xor_sync(~0u, sums[j], offset);
      }
      if (lane < kMergeChannels) totals[warp][j][lane] = sums[j];
    }
    __syncthreads();
    if (threadIdx.x < kMergeChannels && channel < partials.channels) {
      for (int w = 1; w < warps; ++w) {
        sums[0] += totals[w][0][lane];
        sums[1] += totals[w][1][lane];
      }
      finish(channel, sums, loaded);
    }
    __syncthreads();
  }
}

// Sums of each v over the lines, in the threads of line 0. The order is fixed.
template <int kCount, typename A>
__device__ void tree_sums(const RingPlan& plan, const RingWorker& me, A (&v)[kCount], A* shared) {
  for (int height = plan.height; height > 1;) {
    const int half = (height + 1) / 2;
    const int pitch = plan.height / 2 * plan.vectors;
    if (me.line >= half && me.line < height) {
      A* const to = shared + (me.line - half) * plan.vectors + me.column;
#pragma unroll
      for (int k = 0; k < kCount; ++k) to[k * pitch] = v[k];
    }
    __syncthreads();
    if (me.line < height - half) {
      const A* const from = shared + me.line * plan.vectors + me.column;
#pragma unroll
      for (int k = 0; k < kCount; ++k) v[k] += from[k * pitch];
    }
    __syncthreads();
    height = half;
  }
}

}  // namespace braze::cuda
