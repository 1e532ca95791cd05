// residual + scale * x, memory-bound. Bytes per element, x of 16 bits and the rest of fp32, as a
// block with a scale in fp32 has them under autocast: forward 10, backward 8. Where the channels
// are the last dimension in memory each thread keeps to a vector of them; other layouts take
// simple kernels.
#include "launchers/scale_add.h"

#include "cuda/common/channel_grads.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;

const KernelEntry kEntry({"scale_add", "rows", "float64 float32 bfloat16 float16", "sm_80+", true,
                          "a thread for a vector of channels"});

template <typename In, typename Residual, typename Out, int N>
__global__ void __launch_bounds__(kMostRowThreads)
    row_scale_add_kernel(const In* x, const Residual* residual, Out* y, const void* scales,
                         DType dtype, RowPlan plan) {
  using A = acc_t<In>;
  constexpr int U = kRowLoads / 2;
  const RowWorker<N> me(plan, blockIdx.x);
  if (!me.works) return;
  const int64_t step = plan.vectors * N, first = me.begin * step + me.channel;
  A scale[N];
  load_parameters(scale, scales, dtype, me.channel);
  for (int64_t row = me.line; row < me.rows; row += int64_t{plan.height} * U) {
    Packed<In, N> packed_x[U];
    Packed<Residual, N> packed_residual[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r < me.rows) {
        packed_x[u].load(x + first + r * step);
        packed_residual[u].load(residual + first + r * step);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t r = row + u * plan.height;
      if (r >= me.rows) break;
      A v[N], sum[N];
      unpack(packed_x[u], v);
      unpack(packed_residual[u], sum);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += scale[k] * v[k];
      store_as(y + first + r * step, sum);
    }
  }
}

template <typename In, typename Residual, typename Out>
__global__ void __launch_bounds__(kThreads)
    plane_scale_add_kernel(const In* x, const Residual* residual, Out* y, const void* scales,
                           DType dtype, int64_t channels, int64_t inner, int64_t count) {
  using A = acc_t<In>;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += stride) {
    A scale[1];
    load_parameters(scale, scales, dtype, i / inner % channels);
    y[i] = convert<Out>(convert<A>(residual[i]) + scale[0] * convert<A>(x[i]));
  }
}

// A block for each channel.
template <typename In, typename Out>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_scale_grads_kernel(const Out* dy, const In* x, In* dx, const void* scales, void* dscales,
                             DType dtype, PlaneShape shape) {
  using A = acc_t<In>;
  __shared__ double shared[kPlaneThreads / 32];
  const int64_t channel = blockIdx.x;
  A scale[1];
  load_parameters(scale, scales, dtype, channel);
  double sum = 0;
  PlaneCursor<1> cursor(shape, channel, 0);
  for (; cursor.valid(); cursor.advance()) {
    const int64_t offset = cursor.offset();
    const A grad = convert<A>(dy[offset]);
    sum += grad * convert<A>(x[offset]);
    if (dx) dx[offset] = convert<In>(grad * scale[0]);
  }
  sum = plane_block_sum(sum, shared);
  if (threadIdx.x == 0) store_value(dscales, dtype, channel, sum);
}

// dx = dy * scale; what it adds to the scale's gradient.
struct ScaleGrads {
  template <typename A, int N>
  __device__ __forceinline__ void operator()(A (&grad)[N], const A (&value)[N], const A (&scale)[N],
                                             A (&term)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      term[k] = grad[k] * value[k];
      grad[k] *= scale[k];
    }
  }
};

// f(tag of x, tag of the result).
template <typename F>
void dispatch_pair(const ScaleAddShape& shape, const F& f) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (shape.result == DType::kFloat32) return f(tag, TypeTag<float>{});
    }
    f(tag, tag);
  });
}

template <typename In, typename Residual, typename Out>
void launch(cudaStream_t stream, const ScaleAddShape& shape, const In* x, const void* scale,
            const Residual* residual, Out* y) {
  if (shape.inner > 1) {
    plane_scale_add_kernel<<<grid_stride_blocks(shape.count(), kThreads), kThreads, 0, stream>>>(
        x, residual, y, scale, shape.scale, shape.channels, shape.inner, shape.count());
  } else {
    const auto run = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const RowPlan plan = plan_row_pass(shape.outer, shape.channels / N);
      row_scale_add_kernel<In, Residual, Out, N>
          <<<plan.grid(), plan.threads, 0, stream>>>(x, residual, y, scale, shape.scale, plan);
    };
    with_width<In>(shape.channels, run, x, residual, y);
  }
  check_launch("scale_add");
}

}  // namespace

void scale_add(Stream stream, const ScaleAddShape& shape, const void* x, const void* scale,
               const void* residual, void* y) {
  dispatch_pair(shape, [&](auto in, auto out) {
    using In = typename decltype(in)::type;
    using Out = typename decltype(out)::type;
    const auto run = [&](auto* added) {
      launch(as_cuda(stream), shape, static_cast<const In*>(x), scale, added, static_cast<Out*>(y));
    };
    if (shape.residual == shape.dtype) return run(static_cast<const In*>(residual));
    run(static_cast<const Out*>(residual));
  });
}

int64_t scale_add_workspace_bytes(const ScaleAddShape& shape) {
  return shape.inner > 1 ? 0 : channel_grads_workspace_bytes(shape.channels);
}

void scale_add_backward(Stream stream, const ScaleAddShape& shape, const void* dy, const void* x,
                        const void* scale, void* dx, void* dscale, void* workspace) {
  const cudaStream_t s = as_cuda(stream);
  dispatch_pair(shape, [&](auto in, auto out) {
    using In = typename decltype(in)::type;
    using Out = typename decltype(out)::type;
    const Out* grad = static_cast<const Out*>(dy);
    const In* value = static_cast<const In*>(x);
    In* to = static_cast<In*>(dx);
    if (shape.inner > 1) {
      plane_scale_grads_kernel<<<static_cast<unsigned>(shape.channels), kPlaneThreads, 0, s>>>(
          grad, value, to, scale, dscale, shape.scale,
          PlaneShape{shape.outer, shape.channels, shape.inner, 1});
      return check_launch("scale_add_backward");
    }
    const auto run = [&](auto width) {
      launch_channel_grads<decltype(width)::value>(s, shape.outer, shape.channels, grad, value, to,
                                                   scale, dscale, shape.scale, workspace,
                                                   ScaleGrads{});
    };
    with_width<In>(shape.channels, run, grad, value, to);
  });
}

}  // namespace braze::cuda
