// Batch norm. Two kernels each way: one reduces parts of the channels into partial results in the
// workspace, the other begins by merging its channels' partial results (a few KiB from L2, in the
// same order in every block) and then makes a pass over the elements. So there are no atomics, no
// counters to clear and no third launch to merge, and results are bitwise repeatable.
#include "launchers/common/registry.h"
#include "planes.cuh"
#include "rows.cuh"

namespace braze::cuda {
namespace {

// Calls f(N): the widest vector, up to 16 bytes, that divides `extent` and suits the pointers.
template <typename T, typename F, typename... Pointers>
void with_vectors(int64_t extent, const F& f, const Pointers*... pointers) {
  const auto fits = [&](int width) {
    return extent % width == 0 && (vectors_fit(static_cast<const T*>(pointers), width) && ...);
  };
  if constexpr (kVecWidth<T> >= 8) {
    if (fits(8)) return f(std::integral_constant<int, 8>{});
  }
  if constexpr (kVecWidth<T> >= 4) {
    if (fits(4)) return f(std::integral_constant<int, 4>{});
  }
  if (fits(2)) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 1>{});
}

// Runs planes(width, shape, grid) or rows(width, shape, grid), whichever the layout asks for.
template <typename T, typename Planes, typename Rows, typename... Pointers>
void with_layout(const BatchNormShape& shape, const Planes& planes, const Rows& rows,
                 const Pointers*... pointers) {
  if (shape.channels_last) {
    with_vectors<T>(
        shape.c,
        [&](auto width) {
          const int splits = row_splits(shape.count(), shape.c / width);
          const int64_t tiles = ceil_div(shape.c / width, kRowTile);
          rows(width, RowShape{shape.count(), shape.c, splits},
               dim3(splits, static_cast<unsigned int>(tiles)));
        },
        pointers...);
  } else {
    with_vectors<T>(
        shape.inner,
        [&](auto width) {
          const int splits = plane_splits(shape.count() / width, shape.c);
          planes(width, PlaneShape{shape.n, shape.c, shape.inner, splits},
                 dim3(static_cast<unsigned int>(shape.c), splits));
        },
        pointers...);
  }
}

ForwardArgs forward_args(const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                         const BatchNormStatistics& statistics) {
  return {affine,
          buffers.mean,
          buffers.var,
          buffers.dtype,
          buffers.batches,
          !buffers.momentum,
          buffers.momentum.value_or(0),
          eps,
          statistics};
}

constexpr int kCoefficientThreads = 128;

// Calls f(channel) in a warp of its own for each channel.
template <typename F>
__device__ void for_each_channel(int64_t channels, const F& f) {
  const int64_t c = (blockIdx.x * int64_t{kCoefficientThreads} + threadIdx.x) / 32;
  if (c < channels) f(c);
}

// `units` and `unit` as in merge_moments.
template <typename A, bool kTraining>
__global__ void __launch_bounds__(kCoefficientThreads)
    coefficients_kernel(int64_t channels, const MomentsPartial* partials, int splits, int64_t units,
                        int64_t unit, ForwardArgs args) {
  for_each_channel(channels, [&](int64_t c) {
    if constexpr (kTraining) {
      merge_moments<A>(args, partials, splits, units, unit, c, true);
    } else {
      running_coefficients<A>(args, c, threadIdx.x % 32 == 0);
    }
  });
}

// batches: to be counted up here, or nullptr.
template <typename A>
__global__ void __launch_bounds__(kCoefficientThreads)
    given_moments_kernel(int64_t channels, ChannelMoments moments, double count, ForwardArgs args,
                         int64_t* batches) {
  // The next kernel's blocks come when the multiprocessors are free, and take all of them: at batch
  // 64 of the MNIST step it takes 3.3 us then, and up to 5.2 where they gather beside the last ones
  // of the convolution before.
  settle_earlier_kernels();
  if (batches && blockIdx.x == 0 && threadIdx.x == 0) ++*batches;
  for_each_channel(channels, [&](int64_t c) { merge_moments<A>(args, moments, count, c); });
}

__global__ void count_batch_kernel(int64_t* batches) { ++*batches; }

void coefficients_of_moments(cudaStream_t s, const BatchNormShape& shape,
                             const ChannelMoments& moments, const ForwardArgs& args,
                             int64_t* batches) {
  // Where every block reads the number of batches, none can count this one.
  if (args.cumulative && batches) {
    count_batch_kernel<<<1, 1, 0, s>>>(batches);
    check_launch("batch_norm_coefficients");
    batches = nullptr;
  }
  const auto blocks = static_cast<unsigned int>(ceil_div(shape.c, kCoefficientThreads / 32));
  const auto kernel =
      shape.dtype == DType::kFloat64 ? given_moments_kernel<double> : given_moments_kernel<float>;
  launch_early(kernel, blocks, kCoefficientThreads, 0, s, shape.c, moments,
               static_cast<double>(shape.count()), args, batches);
  check_launch("batch_norm_coefficients");
}

template <bool kRelu>
void backward(Stream stream, const BatchNormShape& shape, const void* dy, const void* x,
              const BackwardArgs& args, void* dx, void* workspace) {
  const cudaStream_t s = as_cuda(stream);
  const bool training = args.training;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* grad = static_cast<const T*>(dy);
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(dx);
    auto* partials = static_cast<GradPartial<A>*>(workspace);
    with_layout<T>(
        shape,
        [&](auto width, const PlaneShape& planes, dim3 grid) {
          constexpr int N = decltype(width)::value;
          if (args.has_sums) {
            plane_grad_sums_kernel<T, N, kRelu>
                <<<grid, kPlaneThreads, 0, s>>>(grad, in, args.statistics, planes, partials);
            check_launch("batch_norm_backward");
          }
          const auto kernel = training ? plane_input_grad_kernel<T, N, true, kRelu>
                                       : plane_input_grad_kernel<T, N, false, kRelu>;
          // Without dx one block per channel stores what the sums give.
          kernel<<<dim3(grid.x, dx ? grid.y : 1), kPlaneThreads, 0, s>>>(
              grad, in, out, planes, partials, planes.splits, args);
        },
        [&](auto width, const RowShape& rows, dim3 grid) {
          constexpr int N = decltype(width)::value;
          if (args.has_sums) {
            row_grad_sums_kernel<T, N, kRelu>
                <<<grid, kRowThreads, 0, s>>>(grad, in, args.statistics, rows, partials);
            check_launch("batch_norm_backward");
          }
          const auto kernel = training ? row_input_grad_kernel<T, N, true, kRelu>
                                       : row_input_grad_kernel<T, N, false, kRelu>;
          kernel<<<dim3(dx ? grid.x : 1, grid.y), kRowThreads, 0, s>>>(grad, in, out, rows,
                                                                       partials, rows.splits, args);
        },
        grad, in, out);
  });
  check_launch("batch_norm_backward");
}

const KernelEntry kPlanesEntry({"batch_norm", "planes", "float64 float32 bfloat16 float16",
                                "sm_80+", true, "[n, c, inner]: several blocks per channel"});
const KernelEntry kRowsEntry({"batch_norm", "rows", "float64 float32 bfloat16 float16", "sm_80+",
                              true, "[n, inner, c]: a thread per vector of channels"});

}  // namespace

int64_t batch_norm_workspace_bytes(const BatchNormShape& shape) {
  // The most splits that any vector width leads to; a gradient's partial result is no larger.
  const int64_t rounds = shape.count();
  const int64_t splits =
      shape.channels_last ? sm_count() : ceil_div(int64_t{sm_count()} * kPlaneBlocksPerSm, shape.c);
  return std::min(rounds, splits) * shape.c * sizeof(MomentsPartial);
}

void batch_norm_training(Stream stream, const BatchNormShape& shape, const void* x,
                         const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                         void* y, void* mean, void* rstd, void* workspace) {
  const ForwardArgs args = forward_args(affine, buffers, eps, {mean, rstd, nullptr, nullptr});
  const cudaStream_t s = as_cuda(stream);
  auto* partials = static_cast<MomentsPartial*>(workspace);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    with_layout<T>(
        shape,
        [&](auto width, const PlaneShape& planes, dim3 grid) {
          constexpr int N = decltype(width)::value;
          plane_moments_kernel<T, N>
              <<<grid, kPlaneThreads, 0, s>>>(in, planes, partials, buffers.batches);
          check_launch("batch_norm");
          plane_normalize_kernel<T, N, Source::kBatch>
              <<<grid, kPlaneThreads, 0, s>>>(in, out, planes, partials, planes.splits, args);
        },
        [&](auto width, const RowShape& rows, dim3 grid) {
          constexpr int N = decltype(width)::value;
          row_moments_kernel<T, N>
              <<<grid, kRowThreads, 0, s>>>(in, rows, partials, buffers.batches);
          check_launch("batch_norm");
          row_normalize_kernel<T, N, Source::kBatch>
              <<<grid, kRowThreads, 0, s>>>(in, out, rows, partials, rows.splits, args);
        },
        in, out);
  });
  check_launch("batch_norm");
}

void batch_norm_evaluation(Stream stream, const BatchNormShape& shape, const void* x,
                           const BatchNormAffine& affine, const BatchNormBuffers& buffers,
                           double eps, void* y, void* mean, void* rstd) {
  const ForwardArgs args = forward_args(affine, buffers, eps, {mean, rstd, nullptr, nullptr});
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    with_layout<T>(
        shape,
        [&](auto width, const PlaneShape& planes, dim3 grid) {
          plane_normalize_kernel<T, decltype(width)::value, Source::kRunning>
              <<<grid, kPlaneThreads, 0, s>>>(in, out, planes, nullptr, 0, args);
        },
        [&](auto width, const RowShape& rows, dim3 grid) {
          row_normalize_kernel<T, decltype(width)::value, Source::kRunning>
              <<<grid, kRowThreads, 0, s>>>(in, out, rows, nullptr, 0, args);
        },
        in, out);
  });
  check_launch("batch_norm");
}

void batch_norm_coefficients(Stream stream, const BatchNormShape& shape, bool training,
                             const void* x, const ChannelMoments& moments,
                             const BatchNormAffine& affine, const BatchNormBuffers& buffers,
                             double eps, const BatchNormStatistics& statistics, void* workspace) {
  const ForwardArgs args = forward_args(affine, buffers, eps, statistics);
  const cudaStream_t s = as_cuda(stream);
  if (training && moments.sets > 0) {
    return coefficients_of_moments(s, shape, moments, args, buffers.batches);
  }
  auto* partials = static_cast<MomentsPartial*>(workspace);
  const auto blocks = static_cast<unsigned int>(ceil_div(shape.c, kCoefficientThreads / 32));
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* in = static_cast<const T*>(x);
    if (!training) {
      coefficients_kernel<A, false>
          <<<blocks, kCoefficientThreads, 0, s>>>(shape.c, nullptr, 0, 0, 0, args);
      return;
    }
    with_layout<T>(
        shape,
        [&](auto width, const PlaneShape& planes, dim3 grid) {
          constexpr int N = decltype(width)::value;
          plane_moments_kernel<T, N>
              <<<grid, kPlaneThreads, 0, s>>>(in, planes, partials, buffers.batches);
          check_launch("batch_norm_coefficients");
          coefficients_kernel<A, true><<<blocks, kCoefficientThreads, 0, s>>>(
              shape.c, partials, planes.splits, shape.count() / N, N, args);
        },
        [&](auto width, const RowShape& rows, dim3 grid) {
          row_moments_kernel<T, decltype(width)::value>
              <<<grid, kRowThreads, 0, s>>>(in, rows, partials, buffers.batches);
          check_launch("batch_norm_coefficients");
          coefficients_kernel<A, true><<<blocks, kCoefficientThreads, 0, s>>>(
              shape.c, partials, rows.splits, shape.count(), 1, args);
        },
        in);
  });
  check_launch("batch_norm_coefficients");
}

void batch_norm_relu(Stream stream, const BatchNormShape& shape, const void* x,
                     const BatchNormStatistics& statistics, void* y) {
  ForwardArgs args{};
  args.statistics = statistics;
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    with_layout<T>(
        shape,
        [&](auto width, const PlaneShape& planes, dim3 grid) {
          plane_normalize_kernel<T, decltype(width)::value, Source::kGiven, true>
              <<<grid, kPlaneThreads, 0, s>>>(in, out, planes, nullptr, 0, args);
        },
        [&](auto width, const RowShape& rows, dim3 grid) {
          row_normalize_kernel<T, decltype(width)::value, Source::kGiven, true>
              <<<grid, kRowThreads, 0, s>>>(in, out, rows, nullptr, 0, args);
        },
        in, out);
  });
  check_launch("batch_norm_relu");
}

void batch_norm_backward(Stream stream, const BatchNormShape& shape, bool training, const void* dy,
                         const void* x, const BatchNormAffine& affine, const void* mean,
                         const void* rstd, void* dx, void* dweight, void* dbias, void* workspace) {
  if (!dx && !dweight && !dbias) return;
  const BatchNormStatistics statistics{const_cast<void*>(mean), const_cast<void*>(rstd), nullptr,
                                       nullptr};
  const bool has_sums = dweight || dbias || training;
  backward<false>(stream, shape, dy, x,
                  {affine, statistics, dweight, dbias, nullptr, shape.dtype, training, has_sums},
                  dx, workspace);
}

void batch_norm_relu_backward(Stream stream, const BatchNormShape& shape, bool training,
                              const void* dy, const void* x, const BatchNormAffine& affine,
                              const BatchNormStatistics& statistics, void* dx, void* dweight,
                              void* dbias, void* dconstant, void* workspace) {
  if (!dx && !dweight && !dbias && !dconstant) return;
  const bool has_sums = dweight || dbias || dconstant || training;
  backward<true>(stream, shape, dy, x,
                 {affine, statistics, dweight, dbias, dconstant, shape.dtype, training, has_sums},
                 dx, workspace);
}

}  // namespace braze::cuda
