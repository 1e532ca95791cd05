// Rung 1: one thread per channel, as the formulas read: the mean, the mean square about it, the
// normalised values. A pass over the channel for each.
//
// Neighbouring threads are `inner` elements apart, so that a warp's load goes to 32 different
// sectors and uses an element of each; the rest is used only if L1 still holds the sector when the
// loop comes to it. There are as few threads as channels, so that all but one or two of the
// multiprocessors have nothing to do, and each of these threads waits for an element before it asks
// for the next.
//
// Sums are in float64: a channel is a chain of up to millions of additions here.
#pragma once

#include "rung.cuh"

namespace braze::cuda::batch_norm_ladder {

constexpr int kChannelsPerBlock = 32;

// f(offset) for each element of channel c.
template <typename F>
__device__ void for_each_element(const BatchNormShape& shape, int64_t c, F f) {
  for (int64_t image = 0; image < shape.n; ++image) {
    const int64_t first = (image * shape.c + c) * shape.inner;
    for (int64_t i = 0; i < shape.inner; ++i) f(first + i);
  }
}

template <typename T>
__global__ void thread_per_channel_kernel(Images<T> m) {
  using A = acc_t<T>;
  const int64_t c = blockIdx.x * int64_t{kChannelsPerBlock} + threadIdx.x;
  if (c >= m.shape.c) return;
  const double count = static_cast<double>(m.count());
  double sum = 0, squares = 0;
  for_each_element(m.shape, c, [&](int64_t at) { sum += convert<double>(m.x[at]); });
  const double mean = sum / count;
  for_each_element(m.shape, c, [&](int64_t at) {
    const double d = convert<double>(m.x[at]) - mean;
    squares += d * d;
  });
  batch_coefficients<A>(m.args, count, mean, squares, c);
  const Coefficients<A> k(m.args.statistics, c);
  for_each_element(m.shape, c, [&](int64_t at) { m.y[at] = k.normalize(m.x[at]); });
}

template <typename T>
void run_thread_per_channel(Stream stream, const Images<T>& m) {
  const unsigned blocks = static_cast<unsigned>(ceil_div(m.shape.c, kChannelsPerBlock));
  thread_per_channel_kernel<<<blocks, kChannelsPerBlock, 0, as_cuda(stream)>>>(m);
}

}  // namespace braze::cuda::batch_norm_ladder
