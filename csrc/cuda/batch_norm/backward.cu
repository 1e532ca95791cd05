// Batch norm's backward pass, with an activation and a residual: partial sums over parts of the
// channels, a small kernel that merges them, which gives the parameters' gradients and what dx is
// made with, and a pass that makes dx; or one kernel for all, as forward.
#include "layout.cuh"
#include "held.cuh"
#include "held_rows.cuh"
#include "resident.cuh"

namespace braze::cuda {
namespace {

template <typename A>
__global__ void __launch_bounds__(kCoefficientThreads)
    merge_grads_kernel(int64_t channels, const GradPartial<A>* partials, int splits, int64_t count,
                       BackwardArgs args, GradCoefficients<A> results) {
  wait_for_earlier_kernels();
  for_each_channel(channels, [&](int64_t c) {
    const BackwardCoefficients<A> k = merge_grads<A>(args, partials, splits, count, c, true);
    if (threadIdx.x % 32 == 0) store_coefficients(k, args.statistics, c, results);
  });
}

// Of several processes: what each of them exchanges, with the parameters' gradients, which are its
// own sums'; and what dx is made with by the sums of all.
template <typename A>
__global__ void __launch_bounds__(kCoefficientThreads)
    own_sums_kernel(int64_t channels, const GradPartial<A>* partials, int splits, BackwardArgs args,
                    GradSums* sums) {
  wait_for_earlier_kernels();
  for_each_channel(channels, [&](int64_t c) {
    GradSums total{0, 0};
    for_each_item<32, 9>(partials + c * splits, splits, [&](const GradPartial<A>& part) {
      total.sum += part.sum;
      total.dot += part.dot;
    });
    total = {warp_sum(total.sum), warp_sum(total.dot)};
    if (threadIdx.x % 32 != 0) return;
    const double rstd = static_cast<const A*>(args.statistics.rstd)[c];
    store_value(args.dweight, args.affine.dtype, c, total.dot * rstd);
    store_value(args.dbias, args.affine.dtype, c, total.sum);
    sums[c] = total;
  });
}

template <typename A>
__global__ void __launch_bounds__(kCoefficientThreads)
    gathered_sums_kernel(int64_t channels, const GradSums* sums, const double* total,
                         BackwardArgs args, GradCoefficients<A> results) {
  wait_for_earlier_kernels();
  const int64_t c = blockIdx.x * int64_t{kCoefficientThreads} + threadIdx.x;
  if (c >= channels) return;
  const double rstd = static_cast<const A*>(args.statistics.rstd)[c];
  const LoadedValue weight(args.affine.weight, args.affine.dtype, c, 1);
  const double scale = rstd * weight, by_count = 1 / *total;
  results.by_grad[c] = static_cast<A>(scale);
  results.by_input[c] = static_cast<A>(-scale * rstd * rstd * sums[c].dot * by_count);
  results.offset[c] = static_cast<A>(-scale * sums[c].sum * by_count);
}

// Returns how many partial results each channel has.
template <typename T>
int launch_sums(cudaStream_t s, const BatchNormShape& shape, const Activation& activation,
                const GradSumsArgs<T>& args, GradPartial<acc_t<T>>* partials) {
  int splits = 0;
  with_layout_and_code<T>(
      shape, activation, kHeavyPlaneBlocks,
      [&](auto width, auto code, const PlaneShape& planes, dim3 grid) {
        splits = planes.splits;
        plane_grad_sums_kernel<T, decltype(width)::value, decltype(code)::value>
            <<<grid, kPlaneThreads, 0, s>>>(args, planes, partials);
      },
      [&](auto width, auto code, int64_t rows, int64_t vectors) {
        const RowPlan plan = plan_row_sums(rows, vectors);
        splits = plan.parts;
        row_grad_sums_kernel<T, decltype(width)::value, decltype(code)::value>
            <<<plan.grid(), plan.threads, 0, s>>>(args, plan, partials);
      });
  check_launch("batch_norm_backward");
  return splits;
}

template <typename T>
void launch_input_grad(cudaStream_t s, const BatchNormShape& shape, const Activation& activation,
                       const InputGradArgs<T>& args) {
  with_layout_and_code<T>(
      shape, activation, kPlaneBlocks,
      [&](auto width, auto code, const PlaneShape& planes, dim3 grid) {
        launch_early(plane_input_grad_kernel<T, decltype(width)::value, decltype(code)::value>,
                     grid, kPlaneThreads, 0, s, args, planes);
      },
      [&](auto width, auto code, int64_t rows, int64_t vectors) {
        const RowPlan plan = plan_row_pass(rows, vectors);
        launch_early(row_input_grad_kernel<T, decltype(width)::value, decltype(code)::value>,
                     plan.grid(), plan.threads, 0, s, args, plan);
      });
  check_launch("batch_norm_backward");
}

// Whether it is done.
template <typename T>
bool launch_resident(cudaStream_t s, const BatchNormShape& shape, const Activation& activation,
                     const GradSumsArgs<T>& args, const InputGradArgs<T>& grads,
                     const BackwardArgs& backward, void* workspace) {
  if constexpr (std::is_same_v<T, double>) {
    return false;
  } else {
    if (!backward.training || !grads.dx || !takes_resident<T>(shape, true, kResidentBytes)) {
      return false;
    }
    const RingPlan plan = plan_resident<T>(shape, true);
    const RingPartials<2> partials{static_cast<float*>(workspace), shape.c};
    const bool done = with_ring_code(activation, [&](auto code) {
      launch_cooperative(resident_backward_kernel<T, decltype(code)::value>, plan.parts,
                         plan.threads, plan.shared_bytes(), s, plan, args, grads, backward,
                         partials);
    });
    check_launch("batch_norm_backward");
    return done;
  }
}

// The same by clusters that hold channels of all rows.
template <typename T>
bool grads_held(cudaStream_t s, const BatchNormShape& shape, const Activation& activation,
                const GradSumsArgs<T>& args, const InputGradArgs<T>& grads,
                const BackwardArgs& backward) {
  if constexpr (std::is_same_v<T, double>) {
    return false;
  } else {
    if (!backward.training || !grads.dx) return false;
    const bool done =
        with_held_planes<T>(
            shape, activation, 2, args.residual || args.mask,
            [&](const HeldPlan& plan, auto width, auto code) {
              launch_held(s, plan,
                          held_backward_kernel<T, decltype(width)::value, decltype(code)::value>,
                          args, grads, backward);
            }) ||
        with_held_rows<T>(shape, activation, 2, [&](const HeldRowsPlan& plan, auto code) {
          launch_held_rows(s, plan, held_rows_backward_kernel<T, decltype(code)::value>, args,
                           grads, backward);
        });
    check_launch("batch_norm_backward");
    return done;
  }
}

// The parts of the workspace.
template <typename A>
GradCoefficients<A> coefficients_in(void* workspace, const BatchNormShape& shape) {
  A* const by_channel = static_cast<A*>(workspace);
  return {by_channel, by_channel + shape.c, by_channel + 2 * shape.c};
}
template <typename A>
GradPartial<A>* partials_in(void* workspace, const BatchNormShape& shape) {
  return reinterpret_cast<GradPartial<A>*>(static_cast<double*>(workspace) + 3 * shape.c);
}

}  // namespace

void batch_norm_backward(Stream stream, const BatchNormShape& shape, bool training, const void* dy,
                         const void* x, const BatchNormTail& tail, const void* mask,
                         const BatchNormAffine& affine, const BatchNormStatistics& statistics,
                         const BatchNormGradients& gradients, void* workspace) {
  const BatchNormGradients& d = gradients;
  if (!d.x && !d.residual && !d.weight && !d.bias && !d.constant) return;
  const cudaStream_t s = as_cuda(stream);
  const bool has_sums = d.weight || d.bias || d.constant || training || d.residual;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const GradCoefficients<A> coefficients = coefficients_in<A>(workspace, shape);
    GradPartial<A>* const partials = partials_in<A>(workspace, shape);
    const GradSumsArgs<T> args{static_cast<const T*>(dy),
                               static_cast<const T*>(x),
                               mask ? nullptr : static_cast<const T*>(tail.residual),
                               static_cast<const uint8_t*>(mask),
                               static_cast<T*>(d.residual),
                               statistics,
                               ActivationArgs<A>(tail.activation)};
    const BackwardArgs merge{affine,     statistics,  d.weight, d.bias,
                             d.constant, shape.dtype, training, has_sums};
    // The gradient before the activation is known where it was kept.
    const Activation activation = d.residual ? kIdentity : tail.activation;
    const bool reads_x = training || !activation.identity();
    const InputGradArgs<T> grads{static_cast<const T*>(d.residual ? d.residual : dy),
                                 reads_x ? static_cast<const T*>(x) : nullptr,
                                 static_cast<T*>(d.x),
                                 training,
                                 statistics,
                                 coefficients,
                                 ActivationArgs<A>(activation)};
    if (grads_held<T>(s, shape, tail.activation, args, grads, merge) ||
        launch_resident<T>(s, shape, tail.activation, args, grads, merge, partials)) {
      return;
    }
    int splits = 0;
    if (has_sums) splits = launch_sums<T>(s, shape, tail.activation, args, partials);
    launch_early(merge_grads_kernel<A>, coefficient_blocks(shape.c), kCoefficientThreads, 0, s,
                 shape.c, partials, splits, shape.count(), merge, coefficients);
    check_launch("batch_norm_backward");
    if (!d.x) return;
    launch_input_grad<T>(s, shape, activation, grads);
  });
}

void batch_norm_backward_of_sums(Stream stream, const BatchNormShape& shape, const void* dy,
                                 const void* x, const float* sums, int sets,
                                 const BatchNormAffine& affine,
                                 const BatchNormStatistics& statistics,
                                 const BatchNormGradients& gradients, void* workspace) {
  const BatchNormGradients& d = gradients;
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      const GradCoefficients<float> coefficients = coefficients_in<float>(workspace, shape);
      const BackwardArgs args{affine,     statistics,  d.weight, d.bias,
                              d.constant, shape.dtype, true,     true};
      launch_early(merge_grads_kernel<float>, coefficient_blocks(shape.c), kCoefficientThreads, 0,
                   s, shape.c, reinterpret_cast<const GradPartial<float>*>(sums), sets,
                   shape.count(), args, coefficients);
      check_launch("batch_norm_backward_of_sums");
      if (!d.x) return;
      launch_input_grad<T>(
          s, shape, kIdentity,
          {static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<T*>(d.x), true,
           statistics, coefficients, ActivationArgs<float>(kIdentity)});
    }
  });
}

void batch_norm_sums(Stream stream, const BatchNormShape& shape, const void* dy, const void* x,
                     const BatchNormAffine& affine, const BatchNormStatistics& statistics,
                     GradSums* sums, void* dweight, void* dbias, void* workspace) {
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    GradPartial<A>* const partials = partials_in<A>(workspace, shape);
    const GradSumsArgs<T> args{static_cast<const T*>(dy),
                               static_cast<const T*>(x),
                               nullptr,
                               nullptr,
                               nullptr,
                               statistics,
                               ActivationArgs<A>(kIdentity)};
    const int splits = launch_sums<T>(s, shape, kIdentity, args, partials);
    const BackwardArgs merge{affine, statistics, dweight, dbias, nullptr, shape.dtype, true, true};
    launch_early(own_sums_kernel<A>, coefficient_blocks(shape.c), kCoefficientThreads, 0, s,
                 shape.c, partials, splits, merge, sums);
    check_launch("batch_norm_sums");
  });
}

void batch_norm_input_grad(Stream stream, const BatchNormShape& shape, const void* dy,
                           const void* x, const BatchNormAffine& affine,
                           const BatchNormStatistics& statistics, const GradSums* sums,
                           const double* total, void* dx, void* workspace) {
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const GradCoefficients<A> coefficients = coefficients_in<A>(workspace, shape);
    const BackwardArgs args{affine, statistics, nullptr, nullptr, nullptr, shape.dtype, true, true};
    launch_early(gathered_sums_kernel<A>,
                 static_cast<unsigned>(ceil_div(shape.c, kCoefficientThreads)), kCoefficientThreads,
                 0, s, shape.c, sums, total, args, coefficients);
    check_launch("batch_norm_input_grad");
    launch_input_grad<T>(s, shape, kIdentity,
                         {static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<T*>(dx),
                          true, statistics, coefficients, ActivationArgs<A>(kIdentity)});
  });
}

}  // namespace braze::cuda
