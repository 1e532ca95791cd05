// The filters of a forward block: batch norm's statistics and its affine form, from the moments.
#pragma once

#include "small_k.cuh"

namespace braze::cuda::small_k {

// Mean and covariance of the patches, in shared memory.
template <typename Tp>
struct PatchStatistics {
  double mean[Tp::K];
  double covariance[Tp::K][Tp::K];
};

// The moments on their way: a block's threads have summed a part of the sets each, `parts` to a
// moment. Every block that needs them does so: less work than another launch.
template <typename Tp>
struct MomentSums {
  static constexpr int kMaxThreads = 32 * kMaxTileWarps;
  double sums[Tp::kMoments > kMaxThreads ? Tp::kMoments : kMaxThreads];

  static __device__ __forceinline__ int parts() {
    return max(static_cast<int>(blockDim.x) / Tp::kMoments, 1);
  }

  // A barrier has to follow.
  __device__ __forceinline__ void add(const double* partial, int sets) {
    for (int i = threadIdx.x; i < parts() * Tp::kMoments; i += blockDim.x) {
      sums[i] = strided_sum<18>(partial + i % Tp::kMoments, Tp::kMoments, i / Tp::kMoments, parts(),
                                sets);
    }
  }

  // Ends with a barrier.
  __device__ __forceinline__ void finish(double by_count, PatchStatistics<Tp>& result) const {
    const auto total = [&](int m) {
      double sum = 0;
      for (int part = 0; part < parts(); ++part) sum += sums[part * Tp::kMoments + m];
      return sum * by_count;
    };
    for (int ij = threadIdx.x; ij < Tp::K * Tp::K; ij += blockDim.x) {
      const int i = min(ij / Tp::K, ij % Tp::K), j = max(ij / Tp::K, ij % Tp::K);
      const double mean = total(i);
      result.covariance[ij / Tp::K][ij % Tp::K] = total(Tp::pair(i, j)) - mean * total(j);
      if (ij < Tp::K) result.mean[ij] = total(ij);
    }
    __syncthreads();
  }
};

// The block's filters. The sign of batch norm's scale is folded into the weights (0 for 0), so that
// the maximum of the normalised values is the maximum of the convolution.
template <typename Tp, typename A>
struct Filters {
  static constexpr int kRow = (Tp::K + 3) / 4 * 4;  // 16-byte vectors
  struct Affine {
    A scale, shift;  // normalised = scale * convolution + shift
  };
  alignas(16) A weights[kFilters][kRow];
  alignas(16) Affine affine[kFilters];
};

// Mean and variance of each filter's convolution (kFilterLanes threads a filter), what backward
// needs of them, the running statistics. Blocks that differ in blockIdx.x do the same; the first
// one stores. Ends with a barrier.
constexpr int kFilterLanes = 4;
constexpr int kLeastThreads = 32 * (kMaxTileWarps / 2 + 1);  // of a forward block

template <typename Tp, typename T>
__device__ __forceinline__ void prepare_filters(const SmallKShape& a, const SmallKNorm& norm,
                                                const T* w, const double* partial, int sets,
                                                double* __restrict__ saved,
                                                Filters<Tp, acc_t<T>>& filters) {
  using A = acc_t<T>;
  constexpr int K = Tp::K;
  __shared__ MomentSums<Tp> moments;
  __shared__ PatchStatistics<Tp> patches;
  const int first = static_cast<int>(blockIdx.y) * kFilters;
  const int there = min(kFilters, static_cast<int>(a.k) - first);
  const int f = threadIdx.x / kFilterLanes, lane = threadIdx.x % kFilterLanes, k = first + f;
  const bool owner = f < there, stores = blockIdx.x == 0;
  const int64_t at = owner ? k : first;  // others' results are never used
  const LoadedValue bias(norm.conv_bias, a.dtype, at, 0);
  const LoadedValue gamma(norm.gamma, norm.param_dtype, at, 1);
  const LoadedValue beta(norm.beta, norm.param_dtype, at, 0);
  const LoadedValue old_mean(norm.running_mean, norm.param_dtype, at, 0);
  const LoadedValue old_var(norm.running_var, norm.param_dtype, at, 1);
  // Everything is loaded before the first of it is used. Whole registers, so without conditions: a
  // zero would wait for the load that it stands in for.
  constexpr int kHeld = (kFilters * K + kLeastThreads - 1) / kLeastThreads;
  T held[kHeld];
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    const int i = static_cast<int>(threadIdx.x + u * blockDim.x);
    held[u] = w[int64_t{first} * K + min(i, there * K - 1)];
  }
  const double count = static_cast<double>(a.n * a.p * a.q), by_count = 1 / count;
  if (norm.training) moments.add(partial, sets);
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    const int i = static_cast<int>(threadIdx.x + u * blockDim.x);
    if (i < kFilters * K) {
      filters.weights[i / K][i % K] = i < there * K ? convert<A>(held[u]) : A(0);
    }
  }
  __syncthreads();
  if (norm.training) moments.finish(by_count, patches);
  if (f < kFilters) {                              // whole warps
    double mean = old_mean - bias, var = old_var;  // of the bias-free convolution
    if (norm.training) {
      mean = var = 0;
#pragma unroll
      for (int step = 0; step < K; step += kFilterLanes) {
        const int i = step + lane;
        if (i >= K) break;
        double row = 0;
#pragma unroll
        for (int j = 0; j < K; ++j) {
          row += patches.covariance[i][j] * static_cast<double>(filters.weights[f][j]);
        }
        const double weight = static_cast<double>(filters.weights[f][i]);
        mean += weight * patches.mean[i];
        var += weight * row;
      }
#pragma unroll
      for (int lanes = 1; lanes < kFilterLanes; lanes *= 2) {
        mean += __shfl_xor_sync(~0u, mean, lanes);
        var += __shfl_xor_sync(~0u, var, lanes);
      }
      var = var < 0 ? 0 : var;  // NaN stays
    }
    const double rstd = rsqrt(var + norm.eps);
    const double scale = owner ? gamma * rstd : 0;
    const A sign = static_cast<A>(scale > 0 ? 1 : scale < 0 ? -1 : scale);
    __syncwarp();  // the other lanes have read the weights
#pragma unroll
    for (int step = 0; step < K; step += kFilterLanes) {
      if (step + lane < K) filters.weights[f][step + lane] *= sign;
    }
    if (lane == 0) {
      filters.affine[f] = {static_cast<A>(fabs(scale)), static_cast<A>(beta - mean * scale)};
    }
    if (owner && stores && lane == 0) {
      saved[K + K * K + k] = mean;
      saved[K + K * K + a.k + k] = rstd;
      if (norm.training) {
        const double factor =
            norm.cumulative ? 1 / static_cast<double>(*norm.batches) : norm.momentum;
        store_value(norm.running_mean, norm.param_dtype, k,
                    (1 - factor) * old_mean + factor * (mean + bias));
        store_value(norm.running_var, norm.param_dtype, k,
                    (1 - factor) * old_var + factor * var * count / (count - 1));
      }
    }
  }
  if (stores && blockIdx.y == 0 && norm.training) {
    // A cumulative average needs the number in every block: it has been counted with the moments.
    if (norm.batches && !norm.cumulative && threadIdx.x == 0) *norm.batches += 1;
    for (int i = threadIdx.x; i < K; i += blockDim.x) saved[i] = patches.mean[i];
    for (int i = threadIdx.x; i < K * K; i += blockDim.x) {
      saved[K + i] = patches.covariance[i / K][i % K];
    }
  }
  __syncthreads();
}

}  // namespace braze::cuda::small_k
