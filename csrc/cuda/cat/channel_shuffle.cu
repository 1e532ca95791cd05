// Channels of channels_last images in another order: a copy, bound by memory at twice the tensor's
// bytes. With two groups, or of two channels each as the gradient then has, halves of a pixel are
// interleaved or parted by vectors; else a thread copies an element.
#include "launchers/channel_shuffle.h"

#include <algorithm>

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostElements = int64_t{1} << 30;  // of a launch

const KernelEntry kEntry({"channel_shuffle", "pairs", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "vectors of two halves of a pixel, interleaved or parted"});

// kJoins: the halves [0, half) and [half, 2 half) of an input pixel are interleaved; else the other
// way round. V: elements that a thread takes of either half. `count` vectors, so many of a pixel.
template <typename Raw, int V, bool kJoins>
__global__ void __launch_bounds__(kThreads)
    shuffle_halves_kernel(const Raw* input, Raw* result, int64_t step, int half, FastDiv vectors,
                          int count) {
  const int stride = gridDim.x * kThreads;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += stride) {
    int at;
    const int64_t pixel = vectors.div(i, at);
    at *= V;
    const Raw* const from = input + pixel * step;
    Raw* const to = result + pixel * 2 * half;
    Vec<Raw, V> halves[2];
    Vec<Raw, 2 * V> both;
    if constexpr (kJoins) {
      halves[0] = load_vec<V>(from + at), halves[1] = load_vec<V>(from + half + at);
#pragma unroll
      for (int k = 0; k < 2 * V; ++k) both.v[k] = halves[k % 2].v[k / 2];
      store_vec(to + 2 * at, both);
    } else {
      both = load_vec<2 * V>(from + 2 * at);
#pragma unroll
      for (int k = 0; k < 2 * V; ++k) halves[k % 2].v[k / 2] = both.v[k];
      store_vec(to + at, halves[0]);
      store_vec(to + half + at, halves[1]);
    }
  }
}

// of_group: channels of one.
template <typename Raw>
__global__ void __launch_bounds__(kThreads)
    shuffle_kernel(const Raw* input, Raw* result, int64_t step, FastDiv channels, FastDiv groups,
                   int of_group, int count) {
  const int stride = gridDim.x * kThreads;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += stride) {
    int channel, group;
    const int64_t pixel = channels.div(i, channel);
    const int j = groups.div(channel, group);
    result[i] = input[pixel * step + group * of_group + j];
  }
}

template <typename Raw, int V>
void launch_halves(cudaStream_t stream, const ChannelShuffleArgs& a) {
  const int64_t half = a.channels / 2, count = a.pixels * (half / V);
  const auto run = [&](auto kernel) {
    kernel<<<grid_stride_blocks(count, kThreads), kThreads, 0, stream>>>(
        static_cast<const Raw*>(a.input), static_cast<Raw*>(a.result), a.step,
        static_cast<int>(half), FastDiv(half / V), static_cast<int>(count));
  };
  a.groups == 2 ? run(shuffle_halves_kernel<Raw, V, true>)
                : run(shuffle_halves_kernel<Raw, V, false>);
}

template <typename Raw>
void launch(cudaStream_t stream, const ChannelShuffleArgs& a) {
  const int64_t half = a.channels / 2;
  // Both the halves' vectors and twice as wide ones have to be aligned.
  const auto takes = [&](int64_t width) {
    const int64_t bytes = 2 * width * int64_t{sizeof(Raw)};
    const auto addresses =
        reinterpret_cast<uintptr_t>(a.input) | reinterpret_cast<uintptr_t>(a.result);
    return half % width == 0 && a.step % (2 * width) == 0 && addresses % bytes == 0;
  };
  if (a.groups == 2 || a.channels == 2 * a.groups) {
    constexpr int kWidest = sizeof(Raw) == 2 ? 4 : sizeof(Raw) == 4 ? 2 : 1;
    if (takes(kWidest)) return launch_halves<Raw, kWidest>(stream, a);
    if constexpr (kWidest == 4) {
      if (takes(2)) return launch_halves<Raw, 2>(stream, a);
    }
  }
  const int64_t count = a.pixels * a.channels;
  shuffle_kernel<<<grid_stride_blocks(count, kThreads), kThreads, 0, stream>>>(
      static_cast<const Raw*>(a.input), static_cast<Raw*>(a.result), a.step, FastDiv(a.channels),
      FastDiv(a.groups), static_cast<int>(a.channels / a.groups), static_cast<int>(count));
}

}  // namespace

void channel_shuffle(Stream stream, const ChannelShuffleArgs& args) {
  const int64_t size = size_of(args.dtype),
                most = std::max<int64_t>(1, kMostElements / args.channels);
  for (int64_t first = 0; first < args.pixels; first += most) {
    ChannelShuffleArgs part = args;
    part.pixels = std::min(most, args.pixels - first);
    part.input = static_cast<const char*>(args.input) + first * args.step * size;
    part.result = static_cast<char*>(args.result) + first * args.channels * size;
    switch (size) {
      case 2: launch<uint16_t>(as_cuda(stream), part); break;
      case 4: launch<uint32_t>(as_cuda(stream), part); break;
      default: launch<uint64_t>(as_cuda(stream), part);
    }
    check_launch("channel_shuffle");
  }
}

}  // namespace braze::cuda
