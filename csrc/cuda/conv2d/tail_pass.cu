// Conv2dTail behind a convolution whose kernel does not do it on the way out, or without one, where
// launches decide: batch norm's coefficients are found anew by every thread, which saves the launch
// that leaves them in memory for batch_norm's pass.
#include "launchers/conv2d_tail.h"

#include "tail.cuh"
#include "cuda/common/launch.cuh"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostElements = 1 << 20;

// Rows of `columns` vectors of N channels.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    tail_pass_kernel(const __grid_constant__ Tail tail, const T* added, const T* from, T* y,
                     int64_t vectors, int columns) {
  wait_for_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const int channel = static_cast<int>(i % columns) * N;
  const Vec<T, N> z = load_vec<N>(from + i * N);
  Vec<T, N> other{};
  if (added) other = load_vec<N>(added + i * N);
  Tail::Coefficients c[N];
  tail.find_coefficients(channel, c);
  float v[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    v[k] = c[k](convert<float>(z.v[k])) + convert<float>(other.v[k]);
  }
  tail.activate<T>(v);
  Vec<T, N> result;
#pragma unroll
  for (int k = 0; k < N; ++k) result.v[k] = convert<T>(v[k]);
  store_vec(y + i * N, result);
}

}  // namespace

bool takes_tail_pass(DType dtype, int64_t rows, int64_t channels, const Activation& activation) {
  return dtype != DType::kFloat64 && is_inline(activation) && rows * channels > 0 &&
         rows * channels <= kMostElements && channels % (16 / size_of(dtype)) == 0;
}

void run_tail_pass(Stream stream, DType dtype, int64_t rows, int64_t channels,
                   const Conv2dTail& tail, const void* z, void* y) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      constexpr int N = kVecWidth<T>;
      const int64_t vectors = rows * channels / N;
      launch_early(tail_pass_kernel<T, N>, static_cast<unsigned>(ceil_div(vectors, kThreads)),
                   kThreads, 0, stream, Tail::of(&tail, dtype), static_cast<const T*>(tail.added),
                   static_cast<const T*>(z), static_cast<T*>(y), vectors,
                   static_cast<int>(channels / N));
    }
  });
  check_launch("conv2d tail pass");
}

}  // namespace braze::cuda
