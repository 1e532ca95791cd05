// Copies a kOuter x kDepth tile of an operand into shared memory, 16 bytes or one element at a
// time.
#pragma once

#include "cp_async.cuh"
#include "gemm_operand.cuh"

namespace braze::cuda {

// Tile layouts: offset of element (outer o, depth k), in elements.

// Depth-first rows of outer elements, padded so that a column of it spreads over the banks.
template <typename T, int kOuter, int kDepth>
struct PaddedLayout {
  static constexpr int kRow = kOuter + 16 / static_cast<int>(sizeof(T));
  static constexpr int kSize = kRow * kDepth;
  static __device__ __forceinline__ int offset(int o, int k) { return k * kRow + o; }
};

// Rows of 128 bytes along the depth. XOR-ing the 16-byte chunk with the row puts the eight rows
// that one ldmatrix phase reads into different banks; so do four rows of 64-bit elements, of
// which half a warp reads two chunks each.
template <typename T, int kOuter, int kDepth>
struct DepthMajorLayout {
  static constexpr bool kDepthMajor = true;
  static constexpr int kVec = kVecWidth<T>;
  static_assert(kDepth == 8 * kVec);
  static constexpr int kSize = kOuter * kDepth;
  static __device__ __forceinline__ int offset(int o, int k) {
    const int swizzle = sizeof(T) == 8 ? (o & 3) << 1 : o & 7;
    return o * kDepth + ((k / kVec) ^ swizzle) * kVec + k % kVec;
  }
};

// Rows along the outer index. 16-bit elements are read by ldmatrix.trans (eight rows, one chunk);
// larger ones by single loads, a warp's of 4 rows x 8 columns. Two rows of 64 bytes share a bank
// row.
template <typename T, int kOuter, int kDepth>
struct OuterMajorLayout {
  static constexpr bool kDepthMajor = false;
  static constexpr int kVec = kVecWidth<T>;
  static constexpr int kChunks = kOuter / kVec;
  static_assert(kChunks >= (sizeof(T) == 2 ? 4 : 8));
  static constexpr int kSize = kOuter * kDepth;
  static __device__ __forceinline__ int offset(int o, int k) {
    const int swizzle = sizeof(T) != 2 ? (k & 3) << 1 : kChunks == 4 ? (k >> 1) & 3 : k & 7;
    return k * kOuter + ((o / kVec) ^ swizzle) * kVec + o % kVec;
  }
};

// Outer coordinates that a thread needs again for every tile: gathered ones cost divisions, so they
// are worked out once into shared memory. A matrix has none (MatrixCopies).
template <typename Op, int kOuter>
class OuterTable {
 public:
  using Coord = typename Op::Coord;
  static constexpr int kBytes = Op::kGathered ? kOuter * static_cast<int>(sizeof(Coord)) : 0;

  // The caller synchronises the block before the first at().
  __device__ OuterTable(const Op& op, int outer0, void* shared)
      : table_(static_cast<Coord*>(shared)) {
    if constexpr (Op::kGathered) {
      for (int o = threadIdx.x; o < kOuter; o += blockDim.x) table_[o] = op.outer(outer0 + o);
    }
  }
  __device__ __forceinline__ Coord at(int o) const { return table_[o]; }

 private:
  Coord* table_;
};

// A gathered coordinate costs divisions; where the lanes of a warp need few different ones, every
// lane works out one of them and gets the others by shuffles.
template <typename Offset>
__device__ __forceinline__ Position<Offset> from_lane(const Position<Offset>& p, int lane) {
  return {__shfl_sync(0xffffffff, p.offset, lane), __shfl_sync(0xffffffff, p.h, lane),
          __shfl_sync(0xffffffff, p.w, lane)};
}

template <typename T>
__device__ __forceinline__ void copy_element(T* shared, const T* global, bool valid) {
  if constexpr (sizeof(T) == 2) {  // too small for cp.async
    unsigned short bits = 0;
    // Not by the read-only path: what this kernel reads may be written while it already waits to
    // begin (launch_early). Assembler, so that loads need not wait for the stores between them.
    if (valid) asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(global));
    *reinterpret_cast<unsigned short*>(shared) = bits;
  } else {
    cp_async<sizeof(T)>(shared, global, valid);
  }
}

// N elements: one, or 16 bytes of them.
template <int N, typename T>
__device__ __forceinline__ void copy(T* shared, const T* global, bool valid) {
  if constexpr (N == 1) {
    copy_element(shared, global, valid);
  } else {
    cp_async<16>(shared, global, valid);
  }
}

// for_each(copy) calls copy(place in the tile, address, whether the elements exist) for all that a
// thread copies. Of a masked operand its mask too, kTile elements further on, where behind_mask()
// finds it: in a second pass, because single 16-bit elements do not wait for each other only where
// nothing has to be decided between two of them.
template <int N, int kTile, typename Op, typename ForEach>
__device__ __forceinline__ void copy_all(const Op& op, ForEach for_each) {
  using T = typename Op::T;
  for_each([](T* to, const T* from, bool valid) { copy<N>(to, from, valid); });
  if constexpr (Op::kMasked) {
    if (op.mask == 0) return;
    for_each(
        [&](T* to, const T* from, bool valid) { copy<N>(to + kTile, op.result_at(from), valid); });
  }
}

// What copy_all() has copied takes its final value. No other thread has seen it yet.
template <int N, int kTile, typename T>
__device__ __forceinline__ void behind_mask(T* shared) {
  store_vec<N>(shared, MaskedOperand<T>::template behind_relu<N>(shared, shared + kTile));
}

// A thread's copies of a matrix's tile: rows x columns of them, evenly spaced along one axis each,
// so that an address costs one addition.
template <typename Op>
class MatrixCopies {
  using T = typename Op::T;

 public:
  // The first copy is of element (outer, depth), counted from outer index outer0 and depth 0.
  __device__ MatrixCopies(const Op& op, const T* data, int outer0, int outer, int depth)
      : first_(data + (int64_t{outer0} + outer) * op.outer_stride +
               int64_t{depth} * op.depth_stride),
        outer_stride_(op.outer_stride),
        depth_stride_(op.depth_stride),
        outers_(op.outer_extent - outer0 - outer),
        depths_(op.depth_extent - depth) {}

  // copy(i, j, address, whether the element exists) for elements i * kOuterStep, j * kDepthStep
  // further on.
  template <int kOuters, int kOuterStep, int kDepths, int kDepthStep, typename Copy>
  __device__ __forceinline__ void for_each(int k0, Copy copy) const {
    // enough loads in flight, few enough addresses to stay in registers
    constexpr int kUnrollOuters = kOuters < 8 ? kOuters : 8;
    constexpr int kUnrollDepths = kDepths * kUnrollOuters <= 8 ? kDepths : 8 / kUnrollOuters;
    const T* row = first_ + k0 * depth_stride_;
    const int depths = depths_ - k0;
#pragma unroll(kUnrollDepths)
    for (int j = 0; j < kDepths; ++j, row += kDepthStep * depth_stride_) {
      const T* p = row;
#pragma unroll(kUnrollOuters)
      for (int i = 0; i < kOuters; ++i, p += kOuterStep * outer_stride_) {
        copy(i, j, p, i * kOuterStep < outers_ && j * kDepthStep < depths);
      }
    }
  }

 private:
  const T* first_;
  int64_t outer_stride_, depth_stride_;
  int outers_, depths_;
};

// One element at a time, for any strides. kDepthFast: neighbouring threads take neighbouring
// depths, else neighbouring outer indices, whichever are closer in memory.
template <typename Op, int kOuter, int kDepth, bool kDepthFast, int kThreads, typename Layout>
class GatheredElements {
  using T = typename Op::T;
  static constexpr int kWarps = kThreads / 32;
  // Outer coordinates that a thread needs for every depth stay in registers.
  static constexpr bool kKeep = !kDepthFast;
  static constexpr int kLaneOuters = kOuter / 32;
  static_assert(kDepthFast ? kThreads % kDepth == 0 : kOuter % 32 == 0 && kDepth % kWarps == 0);

 public:
  __device__ GatheredElements(const Op& op, const T* data, int outer0,
                              const OuterTable<Op, kOuter>& table)
      : op_(op), data_(data), table_(table) {
    if constexpr (kKeep) {
#pragma unroll
      for (int j = 0; j < kLaneOuters; ++j) kept_[j] = op.outer(outer0 + threadIdx.x % 32 + 32 * j);
    }
  }

  __device__ __forceinline__ void load(T* tile, int k0) const {
    if constexpr (kDepthFast) {
      const int k = threadIdx.x % kDepth;
      const auto depth = op_.depth(k0 + k);
#pragma unroll 4
      for (int o = threadIdx.x / kDepth; o < kOuter; o += kThreads / kDepth) {
        copy(tile, o, k, table_.at(o), depth);
      }
    } else {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      constexpr int kSteps = kDepth / kWarps;
      const Coord lanes = op_.depth(k0 + warp + lane % kSteps * kWarps);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const Coord depth = from_lane(lanes, i);
#pragma unroll
        for (int j = 0; j < kLaneOuters; ++j) {
          copy(tile, lane + 32 * j, warp + i * kWarps, kept_[j], depth);
        }
      }
    }
  }

 private:
  using Coord = typename Op::Coord;
  __device__ __forceinline__ void copy(T* tile, int o, int k, const Coord& outer,
                                       const Coord& depth) const {
    typename Op::Offset offset;
    const bool valid = op_.locate(outer, depth, offset);
    copy_element(tile + Layout::offset(o, k), data_ + offset, valid);
  }

  const Op& op_;
  const T* data_;
  const OuterTable<Op, kOuter>& table_;
  Coord kept_[kKeep ? kLaneOuters : 1];
};

template <typename Op, int kOuter, int kDepth, bool kDepthFast, int kThreads, typename Layout>
class MatrixElements {
  using T = typename Op::T;
  // Threads along the depth and along the outer axis.
  static constexpr int kAlongDepth =
      kDepthFast ? (kDepth < kThreads ? kDepth : kThreads) : kThreads / 32;
  static constexpr int kAlongOuter = kThreads / kAlongDepth;
  static_assert(kThreads % kAlongDepth == 0 && kOuter % kAlongOuter == 0 &&
                kDepth % kAlongDepth == 0);

 public:
  __device__ MatrixElements(const Op& op, const T* data, int outer0, const OuterTable<Op, kOuter>&)
      : op_(op), copies_(op, data, outer0, outer(), depth()) {}

  __device__ __forceinline__ void load(T* tile, int k0) const {
    copy_all<1, Layout::kSize>(op_, [&](auto copy) {
      copies_.template for_each<kOuters, kAlongOuter, kDepths, kAlongDepth>(
          k0,
          [&](int i, int j, const T* from, bool valid) { copy(element(tile, i, j), from, valid); });
    });
  }

  // To be called between the end of the copies and the barrier, where there is a mask.
  __device__ __forceinline__ void mask(T* tile) const {
    for (int i = 0; i < kOuters; ++i) {
#pragma unroll 4
      for (int j = 0; j < kDepths; ++j) behind_mask<1, Layout::kSize>(element(tile, i, j));
    }
  }

 private:
  static constexpr int kOuters = kOuter / kAlongOuter, kDepths = kDepth / kAlongDepth;
  // The copy at step i along the outer axis, j along the depth.
  static __device__ __forceinline__ T* element(T* tile, int i, int j) {
    return tile + Layout::offset(outer() + i * kAlongOuter, depth() + j * kAlongDepth);
  }
  static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }
  static __device__ __forceinline__ int outer() {
    return kDepthFast ? thread() / kAlongDepth : thread() % 32;
  }
  static __device__ __forceinline__ int depth() {
    return kDepthFast ? thread() % kAlongDepth : thread() / 32;
  }
  const Op& op_;
  MatrixCopies<Op> copies_;
};

template <typename Op, int kOuter, int kDepth, bool kDepthFast, int kThreads, typename Layout>
using ElementLoader =
    std::conditional_t<Op::kGathered,
                       GatheredElements<Op, kOuter, kDepth, kDepthFast, kThreads, Layout>,
                       MatrixElements<Op, kOuter, kDepth, kDepthFast, kThreads, Layout>>;

// 16 bytes at a time along the layout's rows; the operand's `vectors` must hold.
template <typename Op, int kOuter, int kDepth, int kThreads, typename Layout>
class GatheredVectors {
  using T = typename Op::T;
  static constexpr int kVec = kVecWidth<T>;
  static constexpr int kChunks = (Layout::kDepthMajor ? kDepth : kOuter) / kVec;  // of a row
  static constexpr int kRows = Layout::kDepthMajor ? kOuter : kDepth;
  static_assert(kThreads % kChunks == 0 && kRows % (kThreads / kChunks) == 0);

 public:
  __device__ GatheredVectors(const Op& op, const T* data, int outer0,
                             const OuterTable<Op, kOuter>& table)
      : op_(op), data_(data), table_(table) {
    if constexpr (!Layout::kDepthMajor) kept_ = op.outer(outer0 + threadIdx.x % kChunks * kVec);
  }

  __device__ __forceinline__ void load(T* tile, int k0) const {
    const int chunk = threadIdx.x % kChunks * kVec;
    int row = threadIdx.x / kChunks;
    if constexpr (Layout::kDepthMajor) {
      const auto depth = op_.depth(k0 + chunk);
#pragma unroll
      for (int i = 0; i < kRows / (kThreads / kChunks); ++i, row += kThreads / kChunks) {
        copy(tile + Layout::offset(row, chunk), table_.at(row), depth);
      }
    } else {
      // the warp's rows: kWarpRows in each of kSteps steps
      constexpr int kWarpRows = 32 / kChunks, kSteps = kRows / (kThreads / kChunks);
      static_assert(kWarpRows >= 1 && kWarpRows * kSteps <= 32);
      const int lane = threadIdx.x % 32;
      const Coord lanes = op_.depth(k0 + threadIdx.x / 32 * kWarpRows + lane % kWarpRows +
                                    lane / kWarpRows % kSteps * (kThreads / kChunks));
#pragma unroll
      for (int i = 0; i < kSteps; ++i, row += kThreads / kChunks) {
        copy(tile + Layout::offset(chunk, row), kept_,
             from_lane(lanes, i * kWarpRows + lane / kChunks));
      }
    }
  }

 private:
  using Coord = typename Op::Coord;
  __device__ __forceinline__ void copy(T* to, const Coord& outer, const Coord& depth) const {
    typename Op::Offset offset;
    const bool valid = op_.locate(outer, depth, offset);
    cp_async<16>(to, data_ + offset, valid);
  }

  const Op& op_;
  const T* data_;
  const OuterTable<Op, kOuter>& table_;
  Coord kept_;
};

template <typename Op, int kOuter, int kDepth, int kThreads, typename Layout>
class MatrixVectors {
  using T = typename Op::T;
  static constexpr int kVec = kVecWidth<T>;
  static constexpr bool kDepthMajor = Layout::kDepthMajor;
  static constexpr int kChunks = (kDepthMajor ? kDepth : kOuter) / kVec;  // of a row
  static constexpr int kRows = kDepthMajor ? kOuter : kDepth;
  static constexpr int kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);

 public:
  __device__ MatrixVectors(const Op& op, const T* data, int outer0, const OuterTable<Op, kOuter>&)
      : op_(op),
        copies_(op, data, outer0, kDepthMajor ? row() : chunk(), kDepthMajor ? chunk() : row()) {}

  __device__ __forceinline__ void load(T* tile, int k0) const {
    copy_all<kVec, Layout::kSize>(op_, [&](auto copy) {
      copies_.template for_each<kDepthMajor ? kSteps : 1, kStep, kDepthMajor ? 1 : kSteps, kStep>(
          k0, [&](int i, int j, const T* from, bool valid) {
            copy(vector(tile, i + j), from, valid);  // i or j is 0
          });
    });
  }

  // To be called between the end of the copies and the barrier, where there is a mask.
  __device__ __forceinline__ void mask(T* tile) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) behind_mask<kVec, Layout::kSize>(vector(tile, i));
  }

 private:
  static constexpr int kSteps = kRows / kStep;
  static __device__ __forceinline__ T* vector(T* tile, int step) {
    const int r = row() + step * kStep;
    return tile + (kDepthMajor ? Layout::offset(r, chunk()) : Layout::offset(chunk(), r));
  }
  static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }
  static __device__ __forceinline__ int row() { return thread() / kChunks; }
  static __device__ __forceinline__ int chunk() { return thread() % kChunks * kVec; }
  const Op& op_;
  MatrixCopies<Op> copies_;
};

template <typename Op, int kOuter, int kDepth, int kThreads, typename Layout>
using VectorLoader =
    std::conditional_t<Op::kGathered, GatheredVectors<Op, kOuter, kDepth, kThreads, Layout>,
                       MatrixVectors<Op, kOuter, kDepth, kThreads, Layout>>;

}  // namespace braze::cuda
