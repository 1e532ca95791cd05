// The bias gradient of a convolution: sums over all but the channels.
#include <climits>

#include "launchers/conv2d.h"
#include "gather.cuh"
#include "cuda/common/ordered_sum.cuh"
#include "launchers/matmul.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;

// One block per channel and split; threads walk along the pixels.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    channel_sum_kernel(const T* __restrict__ dy, const __grid_constant__ Axis<int64_t> pixels,
                       int64_t channel_stride, int channels, int splits,
                       acc_t<T>* __restrict__ partial) {
  const int channel = blockIdx.x / splits, split = blockIdx.x % splits;
  const int64_t begin = int64_t{pixels.extent} * split / splits;
  const int64_t end = int64_t{pixels.extent} * (split + 1) / splits;
  const T* const from = dy + channel * channel_stride;
  acc_t<T> sum = 0;
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    sum += convert<acc_t<T>>(from[pixels.at(static_cast<int>(i)).offset]);
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partial[split * int64_t{channels} + channel] = sum;
}

int plan(int64_t channels, int64_t pixels) {
  const int64_t wanted = ceil_div(int64_t{sm_count()} * 8, channels);
  return static_cast<int>(std::max<int64_t>(1, std::min(wanted, pixels / (8 * kThreads))));
}

bool as_columns(int64_t c, int64_t h, int64_t w, const Tensor4dRef& t) {
  return t.c == 1 && t.w == c && t.h == w * c && t.n == h * w * c;
}

}  // namespace

int64_t channel_sum_workspace_bytes(DType dtype, int64_t n, int64_t c, int64_t h, int64_t w) {
  if (c == 0) return 0;
  const int64_t accumulator = dtype == DType::kFloat64 ? 8 : 4;
  const ColumnSumArgs columns{dtype, n * h * w, c, nullptr, nullptr, nullptr, nullptr};
  return std::max(column_sum_workspace_bytes(columns), plan(c, n * h * w) * c * accumulator);
}

void channel_sum(Stream stream, DType dtype, int64_t n, int64_t c, int64_t h, int64_t w,
                 const Tensor4dRef& dy, void* out, void* workspace) {
  if (c == 0) return;
  if (as_columns(c, h, w, dy)) {
    return column_sum(stream, {dtype, n * h * w, c, dy.data, nullptr, nullptr, out}, workspace);
  }
  if (n * h * w > INT_MAX - kThreads || c > INT_MAX / 1024) {
    throw std::runtime_error("conv2d: bias gradient: more than 2^31 pixels or 2^21 channels");
  }
  const int splits = plan(c, n * h * w);
  const Axis<int64_t> pixels = pixel_axis<int64_t>(n, h, w, dy);
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    acc_t<T>* const partial = static_cast<acc_t<T>*>(workspace);
    channel_sum_kernel<T><<<static_cast<unsigned>(c * splits), kThreads, 0, as_cuda(stream)>>>(
        static_cast<const T*>(dy.data), pixels, dy.c, static_cast<int>(c), splits, partial);
    check_launch("channel_sum");
    launch_ordered_sum(stream, partial, splits, c, static_cast<T*>(out));
  });
}

}  // namespace braze::cuda
