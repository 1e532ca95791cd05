// Conv2dTail behind a convolution whose kernel does not do it on the way out, where launches
// decide: batch norm's coefficients are found anew by every thread, which saves the launch that
// leaves them in memory for batch_norm's pass.
#include "launchers/conv2d_tail.h"

#include "tail.cuh"
#include "cuda/common/launch.cuh"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostElements = 1 << 20;

// N values of a vector of channels, at once; `otherwise` where there is none.
template <int N>
__device__ __forceinline__ Vec<float, N> loaded(const void* vector, int channel, float otherwise) {
  Vec<float, N> v;
#pragma unroll
  for (float& value : v.v) value = otherwise;
  if (vector) v = load_vec<N>(static_cast<const float*>(vector) + channel);
  return v;
}

// Tail::coefficients() of N channels. One by one they wait for memory again and again.
template <int N>
__device__ __forceinline__ void find_coefficients(const Tail& tail, bool in_vectors, int channel,
                                                  float2 (&c)[N]) {
  if (!in_vectors) {
#pragma unroll
    for (int k = 0; k < N; ++k) c[k] = tail.coefficients(channel + k);
    return;
  }
  const Vec<float, N> gamma = loaded<N>(tail.weight, channel, 1);
  const Vec<float, N> beta = loaded<N>(tail.bias, channel, 0);
  const Vec<float, N> mean = loaded<N>(tail.mean, channel, 0);
  const Vec<float, N> var = loaded<N>(tail.var, channel, 1);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    c[k] = Tail::coefficients(gamma.v[k], beta.v[k], mean.v[k], var.v[k] + tail.eps, 0);
  }
}

// Rows of `columns` vectors of N channels. in_vectors: whether find_coefficients() may load them
// so.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    tail_pass_kernel(const __grid_constant__ Tail tail, bool in_vectors,
                     const T* __restrict__ added, T* y, int64_t vectors, int columns) {
  wait_for_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const int channel = static_cast<int>(i % columns) * N;
  const Vec<T, N> z = load_vec<N>(y + i * N);
  Vec<T, N> other{};
  if (added) other = load_vec<N>(added + i * N);
  float2 c[N];
  find_coefficients(tail, in_vectors, channel, c);
  float v[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    v[k] = fmaf(convert<float>(z.v[k]), c[k].x, c[k].y) + convert<float>(other.v[k]);
  }
  tail.activate<T>(v);
  Vec<T, N> result;
#pragma unroll
  for (int k = 0; k < N; ++k) result.v[k] = convert<T>(v[k]);
  store_vec(y + i * N, result);
}

}  // namespace

bool takes_tail_pass(const Conv2dShape& shape, const Activation& activation) {
  const int64_t count = shape.n * shape.k * shape.p * shape.q;
  return shape.dtype != DType::kFloat64 && is_inline(activation) && count > 0 &&
         count <= kMostElements && shape.k % (16 / size_of(shape.dtype)) == 0;
}

void run_tail_pass(Stream stream, const Conv2dShape& shape, const Conv2dTail& tail, void* y) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      constexpr int N = kVecWidth<T>;
      const int64_t vectors = shape.n * shape.p * shape.q * shape.k / N;
      bool in_vectors = tail.affine == DType::kFloat32 && tail.statistics == DType::kFloat32 &&
                        tail.conv_bias == nullptr;
      for (const void* vector : {tail.weight, tail.bias, tail.mean, tail.var}) {
        in_vectors = in_vectors && reinterpret_cast<uintptr_t>(vector) % 16 == 0;
      }
      launch_early(tail_pass_kernel<T, N>, static_cast<unsigned>(ceil_div(vectors, kThreads)),
                   kThreads, 0, stream, Tail::of(&tail, shape.dtype), in_vectors,
                   static_cast<const T*>(tail.added), static_cast<T*>(y), vectors,
                   static_cast<int>(shape.k / N));
    }
  });
  check_launch("conv2d tail pass");
}

}  // namespace braze::cuda
