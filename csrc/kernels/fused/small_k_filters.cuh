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

// Adds up the partial moments, in every block that needs them: less work than another launch. Ends
// with a barrier.
template <typename Tp>
__device__ __forceinline__ void patch_statistics(const double* __restrict__ partial, int blocks,
                                                 double by_count, PatchStatistics<Tp>& result) {
  constexpr int kMaxThreads = 32 * kMaxTileWarps;
  __shared__ double sums[Tp::kMoments > kMaxThreads ? Tp::kMoments : kMaxThreads];
  const int threads = static_cast<int>(blockDim.x);
  const int parts = max(threads / Tp::kMoments, 1);
  for (int i = threadIdx.x; i < parts * Tp::kMoments; i += threads) {
    const int m = i % Tp::kMoments, part = i / Tp::kMoments;
    sums[i] = strided_sum<16>(partial + m, Tp::kMoments, part, parts, blocks);
  }
  __syncthreads();
  const auto total = [&](int m) {
    double sum = 0;
    for (int part = 0; part < parts; ++part) sum += sums[part * Tp::kMoments + m];
    return sum * by_count;
  };
  for (int ij = threadIdx.x; ij < Tp::K * Tp::K; ij += threads) {
    const int i = min(ij / Tp::K, ij % Tp::K), j = max(ij / Tp::K, ij % Tp::K);
    const int pair = i * Tp::K - i * (i - 1) / 2 + (j - i);
    const double mean = total(i);
    result.covariance[ij / Tp::K][ij % Tp::K] = total(Tp::K + pair) - mean * total(j);
    if (ij < Tp::K) result.mean[ij] = total(ij);
  }
  __syncthreads();
}

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

// Mean and variance of each filter's convolution (one thread a filter), what backward needs of
// them, the running statistics. Blocks that differ in blockIdx.x do the same; the first one stores.
// Ends with a barrier.
template <typename Tp, typename T>
__device__ __forceinline__ void prepare_filters(const SmallKShape& a, const SmallKNorm& norm,
                                                const T* __restrict__ w,
                                                const double* __restrict__ partial, int blocks,
                                                double* __restrict__ saved,
                                                Filters<Tp, acc_t<T>>& filters) {
  using A = acc_t<T>;
  constexpr int K = Tp::K;
  __shared__ PatchStatistics<Tp> patches;
  __shared__ A signs[kFilters];
  const int first = static_cast<int>(blockIdx.y) * kFilters;
  const int there = min(kFilters, static_cast<int>(a.k) - first);
  const int f = threadIdx.x, k = first + f;
  const bool owner = f < there, stores = blockIdx.x == 0;
  double bias = 0, gamma = 0, beta = 0, old_mean = 0, old_var = 0;
  if (owner) {
    bias = param(norm.conv_bias, a.dtype, k, 0);
    gamma = param(norm.gamma, norm.param_dtype, k, 1);
    beta = param(norm.beta, norm.param_dtype, k, 0);
    old_mean = param(norm.running_mean, norm.param_dtype, k, 0);
    old_var = param(norm.running_var, norm.param_dtype, k, 1);
  }
  for (int i = threadIdx.x; i < kFilters * K; i += blockDim.x) {
    filters.weights[i / K][i % K] = i < there * K ? convert<A>(w[int64_t{first} * K + i]) : A(0);
  }
  const double count = static_cast<double>(a.n * a.p * a.q);
  if (norm.training) {
    patch_statistics<Tp>(partial, blocks, 1 / count, patches);
  } else {
    __syncthreads();
  }
  if (f < kFilters) {
    double mean = old_mean - bias, var = old_var;  // of the bias-free convolution
    if (norm.training) {
      mean = var = 0;
      double weight[K];
#pragma unroll
      for (int i = 0; i < K; ++i) weight[i] = static_cast<double>(filters.weights[f][i]);
#pragma unroll
      for (int i = 0; i < K; ++i) {
        double row = 0.5 * patches.covariance[i][i] * weight[i];
#pragma unroll
        for (int j = i + 1; j < K; ++j) row += patches.covariance[i][j] * weight[j];
        mean += weight[i] * patches.mean[i];
        var += 2 * weight[i] * row;
      }
      var = var < 0 ? 0 : var;  // NaN stays
    }
    const double rstd = rsqrt(var + norm.eps);
    const double scale = gamma * rstd;
    filters.affine[f] = {static_cast<A>(fabs(scale)), static_cast<A>(beta - mean * scale)};
    signs[f] = static_cast<A>(scale > 0 ? 1 : scale < 0 ? -1 : scale);
    if (owner && stores) {
      saved[K + K * K + k] = mean;
      saved[K + K * K + a.k + k] = rstd;
      if (norm.training) {
        // moments_kernel has counted this batch
        const double factor =
            norm.cumulative ? 1 / static_cast<double>(*norm.batches) : norm.momentum;
        set_param(norm.running_mean, norm.param_dtype, k,
                  (1 - factor) * old_mean + factor * (mean + bias));
        set_param(norm.running_var, norm.param_dtype, k,
                  (1 - factor) * old_var + factor * var * count / (count - 1));
      }
    }
  }
  if (stores && blockIdx.y == 0 && norm.training) {
    for (int i = threadIdx.x; i < K; i += blockDim.x) saved[i] = patches.mean[i];
    for (int i = threadIdx.x; i < K * K; i += blockDim.x) {
      saved[K + i] = patches.covariance[i / K][i % K];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kFilters * K; i += blockDim.x) {
    filters.weights[i / K][i % K] *= signs[i / K];
  }
  __syncthreads();
}

}  // namespace braze::cuda::small_k
