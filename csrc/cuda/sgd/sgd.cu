// The SGD update of a whole parameter list in one launch.
#include "launchers/sgd.h"

#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/parameter.cuh"
#include "launchers/common/registry.h"
#include "cuda/common/tensor_list.cuh"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;

struct SgdBatch {
  SgdOptions options;
  TensorList<SgdTensor, 80, 2048> list;
};
static_assert(sizeof(SgdBatch) <= 4096, "kernel parameters");

template <typename A>
struct Update {
  LoadedValue lr;  // on its way together with the tensors
  A momentum, kept, weight_decay, unscale;
  bool nesterov, negate, first_step;

  __device__ explicit Update(const SgdOptions& o)
      : lr(o.lr_tensor, o.lr_is_double ? DType::kFloat64 : DType::kFloat32, 0, o.lr),
        momentum(static_cast<A>(o.momentum)),
        kept(static_cast<A>(1 - o.dampening)),
        weight_decay(static_cast<A>(o.weight_decay)),
        unscale(o.grad_scale == nullptr ? A(1) : A(1) / static_cast<A>(*o.grad_scale)),
        nesterov(o.nesterov),
        negate(o.maximize),
        first_step(o.first_step || (o.unwritten != nullptr && *o.unwritten != 0.0f)) {}

  // New values of p and, where there is momentum, of m.
  __device__ void operator()(A& p, A g, A& m, bool has_momentum) const {
    g *= unscale;
    if (negate) g = -g;
    if (weight_decay != A(0)) g += weight_decay * p;
    if (has_momentum) {
      m = first_step ? g : momentum * m + kept * g;
      g = nesterov ? g + momentum * m : m;
    }
    p -= static_cast<A>(static_cast<double>(lr)) * g;
  }
};

// S: dtype of the sources.
template <int N, typename T, typename S>
__device__ void update_range(const Update<acc_t<T>>& update, const SgdTensor& t, int64_t begin,
                             int64_t end) {
  using A = acc_t<T>;
  using Vector = Vec<T, N>;
  T* param = static_cast<T*>(t.param);
  T* grad = static_cast<T*>(t.grad);
  const S* source = static_cast<const S*>(t.source);
  const bool casts = !std::is_same_v<S, T> && source != nullptr;
  T* momentum = static_cast<T*>(t.momentum);
  const bool has_momentum = momentum != nullptr;
  constexpr int kBatch = 2;  // vectors that are loaded before the first is stored
  constexpr int64_t kStep = int64_t{kThreads} * N;
#pragma unroll 1
  for (int64_t i = begin + int64_t{threadIdx.x} * N; i < end; i += kBatch * kStep) {
    Vector p[kBatch], g[kBatch], m[kBatch] = {};
    Vec<S, N> from[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t at = i + b * kStep;
      if (at >= end) break;
      p[b] = *reinterpret_cast<const Vector*>(param + at);
      if (casts) {
        from[b] = *reinterpret_cast<const Vec<S, N>*>(source + at);
      } else {
        g[b] = *reinterpret_cast<const Vector*>(grad + at);
      }
      if (has_momentum && !update.first_step) {
        m[b] = *reinterpret_cast<const Vector*>(momentum + at);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t at = i + b * kStep;
      if (at >= end) break;
      if (casts) {
#pragma unroll
        for (int k = 0; k < N; ++k) g[b].v[k] = convert<T>(convert<A>(from[b].v[k]));
        *reinterpret_cast<Vector*>(grad + at) = g[b];
      }
#pragma unroll
      for (int k = 0; k < N; ++k) {
        A value = convert<A>(p[b].v[k]), velocity = convert<A>(m[b].v[k]);
        update(value, convert<A>(g[b].v[k]), velocity, has_momentum);
        p[b].v[k] = convert<T>(value);
        m[b].v[k] = convert<T>(velocity);
      }
      *reinterpret_cast<Vector*>(param + at) = p[b];
      if (has_momentum) *reinterpret_cast<Vector*>(momentum + at) = m[b];
    }
  }
}

template <typename T, typename S>
__global__ void __launch_bounds__(kThreads) sgd_kernel(const __grid_constant__ SgdBatch batch) {
  int64_t begin, end;
  const SgdTensor& t = batch.list.of_block(blockIdx.x, &begin, &end);
  wait_for_earlier_kernels();
  if (batch.options.found_inf != nullptr && *batch.options.found_inf != 0.0f) return;
  const Update<acc_t<T>> update(batch.options);
  constexpr int N = kVecWidth<T>;
  const auto address = reinterpret_cast<uintptr_t>(t.param) | reinterpret_cast<uintptr_t>(t.grad) |
                       reinterpret_cast<uintptr_t>(t.momentum) |
                       reinterpret_cast<uintptr_t>(t.source);
  if (address % 16 != 0) {
    update_range<1, T, S>(update, t, begin, end);
    return;
  }
  const int64_t vectors_end = begin + (end - begin) / N * N;
  update_range<N, T, S>(update, t, begin, vectors_end);
  update_range<1, T, S>(update, t, vectors_end, end);
}

const KernelEntry kEntry({"sgd", "multi_tensor", "float64 float32 bfloat16 float16", "sm_80+", true,
                          "all parameters in one launch, pointers as kernel parameters"});

}  // namespace

void sgd(Stream stream, DType dtype, const SgdTensor* tensors, int64_t count,
         const SgdOptions& options) {
  SgdBatch batch{};
  batch.options = options;
  const bool casts =
      std::any_of(tensors, tensors + count, [](const SgdTensor& t) { return t.source; });
  batch.list.for_each_launch(tensors, count, [&] {
    const auto launch = [&](auto kernel) {
      launch_early(kernel, batch.list.blocks(), kThreads, 0, stream, batch);
    };
    dispatch(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (std::is_same_v<T, float>) {
        if (casts) {
          return options.source_dtype == DType::kBFloat16 ? launch(sgd_kernel<float, __nv_bfloat16>)
                                                          : launch(sgd_kernel<float, __half>);
        }
      }
      launch(sgd_kernel<T, T>);
    });
    check_launch("sgd");
  });
}

bool sgd_takes_sources(DType dtype, DType source_dtype) {
  return dtype == DType::kFloat32 && size_of(source_dtype) == 2;
}

}  // namespace braze::cuda
