#include "launchers/gather.h"

#include <algorithm>
#include <string>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

// Elements per task, enough to outweigh handing the task over.
constexpr int64_t kGrain = 8192;

// The batch's indices, once all of them are known to be within bounds.
const int64_t* checked_indices(const GatherArgs& args) {
  const int64_t first = args.position == nullptr ? 0 : *args.position;
  if (first < 0 || first > args.index_count - args.batch) {
    throw std::runtime_error("gather_next: a batch of " + std::to_string(args.batch) +
                             " from position " + std::to_string(first) +
                             " is out of bounds for an order of " +
                             std::to_string(args.index_count));
  }
  const int64_t* indices = args.indices + first;
  for (int64_t b = 0; b < args.batch; ++b) {
    if (indices[b] < 0 || indices[b] >= args.count) {
      throw std::runtime_error("gather_images: index " + std::to_string(indices[b]) +
                               " is out of bounds for " + std::to_string(args.count) + " images");
    }
  }
  return indices;
}

// One channel of an image.
template <typename T>
void normalise(const uint8_t* in, acc_t<T> scale, acc_t<T> shift, T* out, int64_t pixels) {
#pragma omp simd
  for (int64_t i = 0; i < pixels; ++i) out[i] = T(static_cast<acc_t<T>>(in[i]) * scale + shift);
}

// All channels of an image, interleaved. kChannels: their number where it is known to the compiler,
// which vectorises the loop then, else 0.
template <int kChannels, typename T>
void interleave(const uint8_t* in, const acc_t<T>* scale, const acc_t<T>* shift, T* out,
                int64_t channels, int64_t pixels) {
  if (kChannels != 0) channels = kChannels;
  for (int64_t i = 0; i < pixels; ++i) {
    for (int64_t c = 0; c < channels; ++c) {
      const auto x = static_cast<acc_t<T>>(in[c * pixels + i]);
      out[i * channels + c] = T(x * scale[c] + shift[c]);
    }
  }
}

const KernelEntry kEntry({"gather_images", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised, threaded"});

}  // namespace

bool gather_images(Stream, const GatherArgs& args, void* batch_images, int64_t* batch_labels,
                   const SmallKShape*, double*) {
  const int64_t* indices = checked_indices(args);
  const int64_t channels = args.channels, pixels = args.pixels, size = channels * pixels;
  for (int64_t b = 0; b < args.batch; ++b) batch_labels[b] = args.labels[indices[b]];
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* out = static_cast<T*>(batch_images);
    const auto* scale = static_cast<const acc_t<T>*>(args.scale);
    const auto* shift = static_cast<const acc_t<T>*>(args.shift);
    if (size == 0) return;
    if (!args.channels_last || channels == 1) {
      const int64_t grain = std::max<int64_t>(1, kGrain / pixels);
      parallel_for(0, args.batch * channels, grain, [&](int64_t first, int64_t last) {
        for (int64_t plane = first; plane < last; ++plane) {
          const int64_t c = plane % channels, source = indices[plane / channels] * channels + c;
          normalise(args.images + source * pixels, scale[c], shift[c], out + plane * pixels,
                    pixels);
        }
      });
      return;
    }
    const int64_t grain = std::max<int64_t>(1, kGrain / size);
    parallel_for(0, args.batch, grain, [&](int64_t first, int64_t last) {
      const auto run = channels == 3 ? interleave<3, T> : interleave<0, T>;
      for (int64_t b = first; b < last; ++b) {
        run(args.images + indices[b] * size, scale, shift, out + b * size, channels, pixels);
      }
    });
  });
  if (args.position != nullptr) *args.position += args.batch;
  return false;
}

}  // namespace braze::cpu
