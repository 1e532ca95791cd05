// Batch norm's forward pass, with an activation and a residual: one kernel reduces parts of the
// channels into partial results in the workspace, a small one merges them, and one makes a pass
// over the elements. There are no atomics and no counters to clear, and results are bitwise
// repeatable. In training one kernel does all three where it can: of tensors that shared memory
// holds (held.cuh, held_rows.cuh), and of large ones in channels_last (resident.cuh).
// ladder/ leads up to it.
#include "layout.cuh"
#include "held.cuh"
#include "held_rows.cuh"
#include "resident.cuh"

namespace braze::cuda {
namespace {

constexpr int kManySets = 640;
constexpr int kManySetsThreads = 256;

__device__ __forceinline__ MomentsPartial as_is(const MomentsPartial& part) { return part; }
__device__ __forceinline__ MomentsPartial as_partial(const Moments& set) {
  return {set.mean, set.m2, set.count};
}

template <typename A>
__global__ void __launch_bounds__(kCoefficientThreads)
    merge_moments_kernel(int64_t channels, const MomentsPartial* partials, int splits, double count,
                         ForwardArgs args) {
  wait_for_earlier_kernels();
  for_each_channel(channels, [&](int64_t c) {
    merge_parts<A>(args, partials + c * splits, splits, count, c, as_is);
  });
}

template <typename A>
__global__ void __launch_bounds__(kCoefficientThreads)
    running_coefficients_kernel(int64_t channels, ForwardArgs args) {
  wait_for_earlier_kernels();
  const int64_t c = blockIdx.x * int64_t{kCoefficientThreads} + threadIdx.x;
  if (c < channels) running_coefficients<A>(args, c);
}

// batches: to be counted up here, or nullptr.
template <typename A>
__global__ void __launch_bounds__(kCoefficientThreads)
    given_moments_kernel(int64_t channels, ChannelMoments moments, double count, ForwardArgs args,
                         int64_t* batches) {
  // The next kernel's blocks come when the multiprocessors are free, and take all of them: at batch
  // 64 of the MNIST step it takes 3.3 us then, and up to 5.2 where they gather beside the last ones
  // of the convolution before.
  order_earlier_kernels();
  if (batches && blockIdx.x == 0 && threadIdx.x == 0) ++*batches;
  for_each_channel(channels, [&](int64_t c) {
    merge_parts<A>(args, moments.data + c * moments.sets, moments.sets, count, c, as_partial);
  });
}

// The same with a block for each channel: large images leave thousands of sets of few channels, and
// a warp would wait for memory a dozen times.
template <typename A>
__global__ void __launch_bounds__(kManySetsThreads)
    many_moments_kernel(ChannelMoments moments, double count, ForwardArgs args, int64_t* batches) {
  order_earlier_kernels();
  if (batches && blockIdx.x == 0 && threadIdx.x == 0) ++*batches;
  const int64_t c = blockIdx.x;
  merge_parts<A, kManySetsThreads>(args, moments.data + c * moments.sets, moments.sets, count, c,
                                   as_partial);
}

// Of several processes: what each of them exchanges, and what follows from all of it.
__global__ void __launch_bounds__(kCoefficientThreads)
    own_moments_kernel(int64_t channels, const MomentsPartial* partials, int splits, double count,
                       MomentsPartial* moments) {
  wait_for_earlier_kernels();
  for_each_channel(channels, [&](int64_t c) {
    const MomentsPartial merged = merged_parts(partials + c * splits, splits, count, as_is);
    if (threadIdx.x % 32 == 0) moments[c] = merged;
  });
}

template <typename A>
__global__ void __launch_bounds__(kCoefficientThreads)
    gathered_moments_kernel(int64_t channels, const MomentsPartial* moments, int parts,
                            ForwardArgs args, double* total) {
  wait_for_earlier_kernels();
  for_each_channel(channels, [&](int64_t c) {
    const MomentsPartial* of_channel = moments + c * parts;
    double count = 0;
    for (int i = threadIdx.x % 32; i < parts; i += 32) count += of_channel[i].count;
    count = warp_sum(count);
    if (c == 0 && threadIdx.x == 0) *total = count;
    if (count > 0) merge_parts<A>(args, of_channel, parts, count, c, as_is);
  });
}

__global__ void count_batch_kernel(int64_t* batches) { ++*batches; }

}  // namespace

void count_batch(cudaStream_t stream, int64_t* batches) {
  count_batch_kernel<<<1, 1, 0, stream>>>(batches);
  check_launch("batch_norm_coefficients");
}

void merge_moments(cudaStream_t stream, const BatchNormShape& shape, const MomentsPartial* partials,
                   int splits, const ForwardArgs& args) {
  const auto kernel =
      shape.dtype == DType::kFloat64 ? merge_moments_kernel<double> : merge_moments_kernel<float>;
  launch_early(kernel, coefficient_blocks(shape.c), kCoefficientThreads, 0, stream, shape.c,
               partials, splits, static_cast<double>(shape.count()), args);
}

namespace {

void coefficients_of_moments(cudaStream_t s, const BatchNormShape& shape,
                             const ChannelMoments& moments, const ForwardArgs& args,
                             int64_t* batches) {
  // Where every block reads the number of batches, none can count this one.
  if (args.cumulative && batches) {
    count_batch(s, batches);
    batches = nullptr;
  }
  const bool is_double = shape.dtype == DType::kFloat64;
  const double count = static_cast<double>(shape.count());
  if (moments.sets >= kManySets) {
    launch_early(is_double ? many_moments_kernel<double> : many_moments_kernel<float>,
                 static_cast<unsigned>(shape.c), kManySetsThreads, 0, s, moments, count, args,
                 batches);
  } else {
    launch_early(is_double ? given_moments_kernel<double> : given_moments_kernel<float>,
                 coefficient_blocks(shape.c), kCoefficientThreads, 0, s, shape.c, moments, count,
                 args, batches);
  }
  check_launch("batch_norm_coefficients");
}

template <typename T>
ApplyArgs<T> apply_args(const void* x, const BatchNormTail& tail,
                        const BatchNormStatistics& statistics, void* y, void* mask) {
  return {static_cast<const T*>(x),
          static_cast<const T*>(tail.residual),
          static_cast<T*>(y),
          static_cast<uint8_t*>(mask),
          statistics,
          ActivationArgs<acc_t<T>>(tail.activation)};
}

// Returns how many partial results each channel has.
int launch_moments(cudaStream_t s, const BatchNormShape& shape, const void* x,
                   MomentsPartial* partials, int64_t* batches) {
  int splits = 0;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = static_cast<const T*>(x);
    with_layout<T>(
        shape, kPlaneBlocks,
        [&](auto width, const PlaneShape& planes, dim3 grid) {
          splits = planes.splits;
          plane_moments_kernel<T, decltype(width)::value>
              <<<grid, kPlaneThreads, 0, s>>>(in, planes, partials, batches);
        },
        [&](auto width, int64_t rows, int64_t vectors) {
          const RowPlan plan = plan_row_sums(rows, vectors);
          splits = plan.parts;
          row_moments_kernel<T, decltype(width)::value>
              <<<plan.grid(), plan.threads, 0, s>>>(in, plan, partials, batches);
        });
  });
  check_launch("batch_norm_coefficients");
  return splits;
}

}  // namespace

int64_t batch_norm_workspace_bytes(const BatchNormShape& shape) {
  // The most parts that any vector width leads to, and, for the backward pass, three coefficients
  // per channel; a gradient's partial result is no larger than the moments'.
  const int64_t splits = shape.channels_last
                             ? sm_count()
                             : ceil_div(int64_t{sm_count()} * kPlaneBlocks * kPlaneWaves, shape.c);
  return (std::min(shape.count(), splits) * sizeof(MomentsPartial) + 3 * sizeof(double)) * shape.c;
}

int64_t batch_norm_mask_bytes(const BatchNormShape& shape, const BatchNormTail& tail) {
  if (!tail.residual || tail.activation.smooth() || tail.activation.identity()) return 0;
  int64_t bytes = 0;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_vectors<T>(shape.channels_last ? shape.c : shape.inner,
                    [&](auto width) { bytes = shape.count() * shape.c / decltype(width)::value; });
  });
  return bytes;
}

void batch_norm_coefficients(Stream stream, const BatchNormShape& shape, bool training,
                             const void* x, const ChannelMoments& moments,
                             const BatchNormAffine& affine, const BatchNormBuffers& buffers,
                             double eps, const BatchNormStatistics& statistics, void* workspace) {
  const ForwardArgs args = forward_args(affine, buffers, eps, statistics);
  const cudaStream_t s = as_cuda(stream);
  if (!training) {
    const auto kernel = shape.dtype == DType::kFloat64 ? running_coefficients_kernel<double>
                                                       : running_coefficients_kernel<float>;
    launch_early(kernel, static_cast<unsigned>(ceil_div(shape.c, kCoefficientThreads)),
                 kCoefficientThreads, 0, s, shape.c, args);
  } else if (moments.sets > 0) {
    coefficients_of_moments(s, shape, moments, args, buffers.batches);
  } else {
    auto* partials = static_cast<MomentsPartial*>(workspace);
    const int splits = launch_moments(s, shape, x, partials, buffers.batches);
    merge_moments(s, shape, partials, splits, args);
  }
  check_launch("batch_norm_coefficients");
}

void batch_norm_moments(Stream stream, const BatchNormShape& shape, const void* x,
                        MomentsPartial* moments, void* workspace) {
  const cudaStream_t s = as_cuda(stream);
  auto* partials = static_cast<MomentsPartial*>(workspace);
  const int splits = launch_moments(s, shape, x, partials, nullptr);
  launch_early(own_moments_kernel, coefficient_blocks(shape.c), kCoefficientThreads, 0, s, shape.c,
               partials, splits, static_cast<double>(shape.count()), moments);
  check_launch("batch_norm_moments");
}

void batch_norm_merge(Stream stream, const BatchNormShape& shape, const MomentsPartial* moments,
                      int parts, const BatchNormAffine& affine, const BatchNormBuffers& buffers,
                      double eps, const BatchNormStatistics& statistics, double* total) {
  const cudaStream_t s = as_cuda(stream);
  if (buffers.batches) count_batch(s, buffers.batches);
  const auto kernel = shape.dtype == DType::kFloat64 ? gathered_moments_kernel<double>
                                                     : gathered_moments_kernel<float>;
  launch_early(kernel, coefficient_blocks(shape.c), kCoefficientThreads, 0, s, shape.c, moments,
               parts, forward_args(affine, buffers, eps, statistics), total);
  check_launch("batch_norm_merge");
}

void batch_norm_apply(Stream stream, const BatchNormShape& shape, const void* x,
                      const BatchNormTail& tail, const BatchNormStatistics& statistics, void* y,
                      void* mask) {
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ApplyArgs<T> args = apply_args<T>(x, tail, statistics, y, mask);
    with_layout_and_code<T>(
        shape, tail.activation, kHeavyPlaneBlocks,
        [&](auto width, auto code, const PlaneShape& planes, dim3 grid) {
          launch_early(plane_apply_kernel<T, decltype(width)::value, decltype(code)::value>, grid,
                       kPlaneThreads, 0, s, args, planes);
        },
        [&](auto width, auto code, int64_t rows, int64_t vectors) {
          const RowPlan plan = plan_row_pass(rows, vectors);
          launch_early(row_apply_kernel<T, decltype(width)::value, decltype(code)::value>,
                       plan.grid(), plan.threads, 0, s, args, plan);
        });
  });
  check_launch("batch_norm_apply");
}

bool batch_norm_resident(Stream stream, const BatchNormShape& shape, const void* x,
                         const ForwardArgs& forward, const BatchNormTail& tail, void* y, void* mask,
                         int64_t* batches, void* workspace, int64_t least_bytes) {
  bool done = false;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      if (!takes_resident<T>(shape, false, least_bytes)) return;
      const RingPlan plan = plan_resident<T>(shape, false);
      const RingPartials<3> partials{static_cast<float*>(workspace), shape.c};
      const ApplyArgs<T> args = apply_args<T>(x, tail, forward.statistics, y, mask);
      done = with_ring_code(tail.activation, [&](auto code) {
        launch_cooperative(resident_forward_kernel<T, decltype(code)::value>, plan.parts,
                           plan.threads, plan.shared_bytes(), as_cuda(stream), plan, args, forward,
                           partials, 1 / static_cast<double>(shape.count()), batches);
      });
    }
  });
  check_launch("batch_norm_train");
  return done;
}

namespace {

// batch_norm_train as one kernel whose clusters hold channels of all rows; whether it is done.
bool train_held(Stream stream, const BatchNormShape& shape, const void* x,
                const ForwardArgs& forward, const BatchNormTail& tail, void* y, void* mask,
                int64_t* batches) {
  if (forward.cumulative) return false;  // all blocks would read the number that one counts up
  bool done = false;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      const ApplyArgs<T> args = apply_args<T>(x, tail, forward.statistics, y, mask);
      done = with_held_planes<T>(
          shape, tail.activation, 1, false, [&](const HeldPlan& plan, auto width, auto code) {
            launch_held(as_cuda(stream), plan,
                        held_forward_kernel<T, decltype(width)::value, decltype(code)::value>, args,
                        forward, batches);
          });
      if (done) return;
      done = with_held_rows<T>(shape, tail.activation, 1, [&](const HeldRowsPlan& plan, auto code) {
        launch_held_rows(as_cuda(stream), plan, held_rows_forward_kernel<T, decltype(code)::value>,
                         args, forward, batches);
      });
    }
  });
  check_launch("batch_norm_train");
  return done;
}

}  // namespace

void batch_norm_train(Stream stream, const BatchNormShape& shape, const void* x,
                      const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                      const BatchNormTail& tail, const BatchNormStatistics& statistics, void* y,
                      void* mask, void* workspace) {
  const ForwardArgs forward = forward_args(affine, buffers, eps, statistics);
  if (train_held(stream, shape, x, forward, tail, y, mask, buffers.batches) ||
      batch_norm_resident(stream, shape, x, forward, tail, y, mask, buffers.batches, workspace,
                          kResidentBytes)) {
    return;
  }
  batch_norm_coefficients(stream, shape, true, x, {}, affine, buffers, eps, statistics, workspace);
  batch_norm_apply(stream, shape, x, tail, statistics, y, mask);
}

}  // namespace braze::cuda
