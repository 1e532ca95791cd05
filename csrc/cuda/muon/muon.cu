// Muon's momentum of a whole parameter list in one launch, and the polynomial of its Newton-Schulz
// iterations.
#include "launchers/muon.h"

#include "cuda/common/multi_tensor.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;

const KernelEntry kMomentum({"muon_momentum", "multi_tensor", "float64 float32 bfloat16 float16",
                             "sm_80+", true,
                             "all parameters in one launch, pointers as kernel parameters"});
const KernelEntry kPolynomial({"muon_polynomial", "vectorized", "float64 float32 bfloat16 float16",
                               "sm_80+", true, "16 bytes per thread and access"});

template <int N, typename T>
__global__ void __launch_bounds__(kThreads)
    polynomial_kernel(const T* gram, T* square, int64_t count, int64_t n, acc_t<T> a, acc_t<T> b,
                      acc_t<T> c) {
  wait_for_earlier_kernels();
  using A = acc_t<T>;
  const int64_t stride = int64_t{gridDim.x} * kThreads * N;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * N; i < count; i += stride) {
    const Vec<T, N> g = load_vec<N>(gram + i);
    Vec<T, N> s = load_vec<N>(square + i);
    const int64_t place = i % (n * n);  // N divides n: a vector lies in one row
    const int64_t row = place / n, column = place - row * n;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const A value = b * convert<A>(g.v[k]) + c * convert<A>(s.v[k]);
      s.v[k] = convert<T>(column + k == row ? value + a : value);
    }
    store_vec(square + i, s);
  }
}

}  // namespace

static_assert(kUpdateElements == kMuonSquares);

void muon_momentum(Stream stream, DType dtype, const MuonTensor* tensors, int64_t count,
                   const MuonOptions& options) {
  multi_tensor_update<MuonUpdate>("muon_momentum", stream, dtype, tensors, count, options);
}

void muon_polynomial(Stream stream, DType dtype, const void* gram, void* square, int64_t batch,
                     int64_t n, double a, double b, double c) {
  const int64_t count = batch * n * n;
  if (count == 0) return;
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const auto* const from = static_cast<const T*>(gram);
    auto* const to = static_cast<T*>(square);
    const auto launch = [&](auto kernel, int width) {
      launch_early(kernel, grid_stride_blocks(ceil_div(count, width), kThreads), kThreads, 0,
                   stream, from, to, count, n, static_cast<A>(a), static_cast<A>(b),
                   static_cast<A>(c));
    };
    constexpr int N = kVecWidth<T>;
    if (n % N == 0 && is_vec_aligned(from) && is_vec_aligned(to)) {
      launch(polynomial_kernel<N, T>, N);
    } else {
      launch(polynomial_kernel<1, T>, 1);
    }
  });
  check_launch("muon_polynomial");
}

}  // namespace braze::cuda
