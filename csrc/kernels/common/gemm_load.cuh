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
// that one ldmatrix phase reads into different banks.
template <typename T, int kOuter, int kDepth>
struct DepthMajorLayout {
  static constexpr bool kDepthMajor = true;
  static constexpr int kVec = kVecWidth<T>;
  static_assert(kDepth == 8 * kVec);
  static constexpr int kSize = kOuter * kDepth;
  static __device__ __forceinline__ int offset(int o, int k) {
    return o * kDepth + ((k / kVec) ^ (o & 7)) * kVec + k % kVec;
  }
};

// Rows along the outer index. 16-bit elements are read by ldmatrix.trans (eight rows, one chunk);
// 32-bit ones by single loads of 4 rows x 8 columns. Two rows of 64 bytes share a bank row.
template <typename T, int kOuter, int kDepth>
struct OuterMajorLayout {
  static constexpr bool kDepthMajor = false;
  static constexpr int kVec = kVecWidth<T>;
  static constexpr int kChunks = kOuter / kVec;
  static_assert(kChunks >= (sizeof(T) == 2 ? 4 : 8));
  static constexpr int kSize = kOuter * kDepth;
  static __device__ __forceinline__ int offset(int o, int k) {
    const int swizzle = sizeof(T) == 4 ? (k & 3) << 1 : kChunks == 4 ? (k >> 1) & 3 : k & 7;
    return k * kOuter + ((o / kVec) ^ swizzle) * kVec + o % kVec;
  }
};

// Outer coordinates that a thread needs again for every tile: gathered ones cost divisions, so they
// are worked out once into shared memory; a matrix's are cheaper to recompute.
template <typename Op, int kOuter>
class OuterTable {
 public:
  using Coord = typename Op::Coord;
  static constexpr int kBytes = Op::kGathered ? kOuter * static_cast<int>(sizeof(Coord)) : 0;

  // The caller synchronises the block before the first at().
  __device__ OuterTable(const Op& op, int outer0, void* shared)
      : op_(op), outer0_(outer0), table_(static_cast<Coord*>(shared)) {
    if constexpr (Op::kGathered) {
      for (int o = threadIdx.x; o < kOuter; o += blockDim.x) table_[o] = op.outer(outer0 + o);
    }
  }
  __device__ __forceinline__ Coord at(int o) const {
    if constexpr (Op::kGathered) {
      return table_[o];
    } else {
      return op_.outer(outer0_ + o);
    }
  }

 private:
  const Op& op_;
  int outer0_;
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
    if (valid) bits = __ldg(reinterpret_cast<const unsigned short*>(global));
    *reinterpret_cast<unsigned short*>(shared) = bits;
  } else {
    cp_async<sizeof(T)>(shared, global, valid);
  }
}

// One element at a time, for any strides. kDepthFast: neighbouring threads take neighbouring
// depths, else neighbouring outer indices, whichever are closer in memory.
template <typename Op, int kOuter, int kDepth, bool kDepthFast, int kThreads, typename Layout>
class ElementLoader {
  using T = typename Op::T;
  static constexpr int kWarps = kThreads / 32;
  // Gathered outer coordinates that a thread needs for every depth stay in registers.
  static constexpr bool kKeep = !kDepthFast && Op::kGathered;
  static constexpr int kLaneOuters = kOuter / 32;
  static_assert(kDepthFast ? kThreads % kDepth == 0 : kOuter % 32 == 0 && kDepth % kWarps == 0);

 public:
  __device__ ElementLoader(const Op& op, const T* data, int outer0,
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
      if constexpr (kKeep) {
        const Coord lanes = op_.depth(k0 + warp + lane % kSteps * kWarps);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const Coord depth = from_lane(lanes, i);
#pragma unroll
          for (int j = 0; j < kLaneOuters; ++j) {
            copy(tile, lane + 32 * j, warp + i * kWarps, kept_[j], depth);
          }
        }
      } else {
#pragma unroll(kSteps <= 2 ? kSteps : 1)
        for (int i = 0; i < kSteps; ++i) {
          const Coord depth = op_.depth(k0 + warp + i * kWarps);
#pragma unroll
          for (int j = 0; j < kLaneOuters; ++j) {
            const int o = lane + 32 * j;
            copy(tile, o, warp + i * kWarps, table_.at(o), depth);
          }
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

// 16 bytes at a time along the layout's rows; the operand's `vectors` must hold.
template <typename Op, int kOuter, int kDepth, int kThreads, typename Layout>
class VectorLoader {
  using T = typename Op::T;
  static constexpr int kVec = kVecWidth<T>;
  static constexpr int kChunks = (Layout::kDepthMajor ? kDepth : kOuter) / kVec;  // of a row
  static constexpr int kRows = Layout::kDepthMajor ? kOuter : kDepth;
  static constexpr bool kKeep = !Layout::kDepthMajor && Op::kGathered;
  static_assert(kThreads % kChunks == 0 && kRows % (kThreads / kChunks) == 0);

 public:
  __device__ VectorLoader(const Op& op, const T* data, int outer0,
                          const OuterTable<Op, kOuter>& table)
      : op_(op), data_(data), table_(table) {
    if constexpr (kKeep) kept_ = op.outer(outer0 + threadIdx.x % kChunks * kVec);
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
    } else if constexpr (kKeep) {
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
    } else {
#pragma unroll
      for (int i = 0; i < kRows / (kThreads / kChunks); ++i, row += kThreads / kChunks) {
        copy(tile + Layout::offset(chunk, row), table_.at(chunk), op_.depth(k0 + row));
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

}  // namespace braze::cuda
