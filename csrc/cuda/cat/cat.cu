// Concatenation along channels of channels_last tensors, and its gradient: copies, bound by memory
// at twice the result's bytes, in one launch for all tensors. A thread keeps to one vector of a
// pixel, so that it looks up once where that comes from and goes to, and walks down the pixels.
#include "launchers/cat.h"

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostCopies = 64;  // of a launch

const KernelEntry kEntry({"cat_channels", "columns", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "many tensors in one launch, a thread for a vector of a pixel"});

// Strides and ends in vectors.
struct VectorCopy {
  const void* from;
  void* to;
  int64_t from_stride, to_stride;
  int64_t end;  // behind its vectors among all of a pixel
};

struct CopyList {
  VectorCopy copies[kMostCopies];
  int64_t vectors;  // of a pixel, in all copies
  int64_t pixels;
  int64_t width, height;  // how many vectors of how many pixels all threads take at a time
};
static_assert(sizeof(CopyList) <= 3840, "kernel parameters, of which there are 4 KB");

// kLoads vectors are loaded before the first is stored.
template <typename Raw, int kLoads>
__global__ void __launch_bounds__(kThreads)
    copy_channels_kernel(const __grid_constant__ CopyList list) {
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t line = thread / list.width;
  if (line >= list.height) return;
  // Once around, unless a pixel has more vectors than there are threads.
  for (int64_t v = thread % list.width; v < list.vectors; v += list.width) {
    int k = 0;
    while (v >= list.copies[k].end) ++k;
    const VectorCopy& copy = list.copies[k];
    const int64_t at = v - (k > 0 ? list.copies[k - 1].end : 0);
    const int64_t from_step = copy.from_stride * list.height;
    const int64_t to_step = copy.to_stride * list.height;
    const Raw* from = static_cast<const Raw*>(copy.from) + line * copy.from_stride + at;
    Raw* to = static_cast<Raw*>(copy.to) + line * copy.to_stride + at;
    for (int64_t pixel = line; pixel < list.pixels; pixel += list.height * kLoads) {
      Raw loaded[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        if (pixel + u * list.height < list.pixels) loaded[u] = from[u * from_step];
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        if (pixel + u * list.height < list.pixels) store_raw(to + u * to_step, loaded[u]);
      }
      from += kLoads * from_step;
      to += kLoads * to_step;
    }
  }
}

// The widest access, in bytes, that all copies allow.
int access_bytes(const ChannelCopy* copies, int64_t count) {
  uint64_t all = 16;
  for (int64_t i = 0; i < count; ++i) {
    const ChannelCopy& c = copies[i];
    all |= reinterpret_cast<uintptr_t>(c.from) | reinterpret_cast<uintptr_t>(c.to) | c.from_stride |
           c.to_stride | c.bytes;
  }
  return static_cast<int>(all & (~all + 1));
}

template <int kBytes>
void launch(cudaStream_t stream, int64_t pixels, const ChannelCopy* copies, int64_t count) {
  CopyList list{};
  list.pixels = pixels;
  for (int64_t i = 0; i < count; ++i) {
    const ChannelCopy& c = copies[i];
    list.vectors += c.bytes / kBytes;
    list.copies[i] = {c.from, c.to, c.from_stride / kBytes, c.to_stride / kBytes, list.vectors};
  }
  const int blocks = grid_stride_blocks(pixels * list.vectors, kThreads);
  const int64_t threads = int64_t{blocks} * kThreads;
  list.width = std::min(list.vectors, threads);
  list.height = threads / list.width;
  constexpr int kLoads = kBytes == 16 ? 4 : 8;
  copy_channels_kernel<typename RawAccess<kBytes>::type, kLoads>
      <<<blocks, kThreads, 0, stream>>>(list);
  check_launch("cat_channels");
}

}  // namespace

void copy_channels(Stream stream, int64_t pixels, const ChannelCopy* copies, int64_t count) {
  const int bytes = access_bytes(copies, count);
  for (int64_t i = 0; i < count; i += kMostCopies) {
    const int64_t some = std::min<int64_t>(count - i, kMostCopies);
    switch (bytes) {
      case 16: launch<16>(as_cuda(stream), pixels, copies + i, some); break;
      case 8: launch<8>(as_cuda(stream), pixels, copies + i, some); break;
      case 4: launch<4>(as_cuda(stream), pixels, copies + i, some); break;
      default: launch<2>(as_cuda(stream), pixels, copies + i, some);
    }
  }
}

}  // namespace braze::cuda
