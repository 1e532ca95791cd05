// What both directions of conv_bn_relu_max_pool2d.h share on the CPU: the image that a thread works
// on, and sums of several threads.
#pragma once

#include <algorithm>
#include <mutex>
#include <type_traits>
#include <vector>

#include "cpu/conv_bn_relu2d/bn_pool_codes.h"
#include "cpu/common/copy_matrix.h"
#include "cpu/common/simd.h"
#include "launchers/conv_bn_relu_max_pool2d.h"

namespace braze::cpu {

// One image with its zero padding, and where each filter tap reads in it. A vector may be read from
// any position of a patch.
template <typename A>
struct PaddedImage {
  explicit PaddedImage(const SmallKShape& a)
      : height(a.p + a.r - 1), pitch(a.q + a.s - 1), values(a.c * height * pitch + kLanes<A>) {
    for (int64_t c = 0; c < a.c; ++c) {
      for (int64_t r = 0; r < a.r; ++r) {
        for (int64_t s = 0; s < a.s; ++s) taps.push_back((c * height + r) * pitch + s);
      }
    }
  }

  template <typename T>
  void load(const SmallKShape& a, const T* x, int64_t n) {
    for (int64_t c = 0; c < a.c; ++c) {
      for (int64_t h = 0; h < std::min(a.h, height - a.pad_h); ++h) {
        const T* row = x + n * a.x_n + c * a.x_c + h * a.x_h;
        A* out = values.data() + (c * height + h + a.pad_h) * pitch + a.pad_w;
        const int64_t width = std::min(a.w, pitch - a.pad_w);
        if constexpr (std::is_same_v<A, acc_t<T>>) {
          copy_row(out, row, a.x_w, width);
        } else if (a.x_w == 1) {  // a loop of its own, which is vectorised
          for (int64_t w = 0; w < width; ++w) out[w] = static_cast<A>(row[w]);
        } else {
          for (int64_t w = 0; w < width; ++w) out[w] = static_cast<A>(row[w * a.x_w]);
        }
      }
    }
  }

  int64_t height, pitch;
  std::vector<A> values;
  std::vector<int64_t> taps;
};

// Adds this thread's sums to the shared ones in the order of the ranges, whichever thread finishes
// first, so that the result does not depend on scheduling. (Ranges depend on the thread count.)
class OrderedSum {
 public:
  explicit OrderedSum(int64_t size) : size_(size) {}
  void add(int64_t range_begin, std::vector<double> sums) {
    const std::lock_guard<std::mutex> lock(mutex_);
    parts_.emplace_back(range_begin, std::move(sums));
  }
  std::vector<double> total() {
    std::sort(parts_.begin(), parts_.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<double> sum(size_);
    for (const auto& part : parts_) {
      for (int64_t i = 0; i < size_; ++i) sum[i] += part.second[i];
    }
    return sum;
  }

 private:
  int64_t size_;
  std::mutex mutex_;
  std::vector<std::pair<int64_t, std::vector<double>>> parts_;
};

// Values and codes of the pooled pixels of an image: [pixel][filter], filters padded to whole
// vectors, a byte for each code.
template <typename A>
struct PooledImage {
  static constexpr int64_t kL = kLanes<A>;
  typedef uint8_t Codes __attribute__((vector_size(kLanes<A>)));
  using Positions = decltype(vec_t<A>{} == vec_t<A>{});

  explicit PooledImage(const SmallKShape& a)
      : q(a.q / 2),
        pixels(a.p / 2 * q),
        filters(a.k),
        words(ceil_div(a.k, 8)),
        vectors(ceil_div(a.k, kL)),
        width(vectors * kL),
        codes_width(std::max(width, words * 8)),
        values(pixels * width),
        codes(pixels * codes_width) {}

  // Whether rows of dense NHWC memory have this form.
  template <typename T>
  bool matches(const SmallKShape& a) const {
    return std::is_same_v<T, A> && a.channels_last && width == filters;
  }

  void pack_codes(uint32_t* to) const {
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      for (int64_t i = 0; i < words; ++i) *to++ = pack8(&codes[pixel * codes_width + i * 8]);
    }
  }
  void unpack_codes(const uint32_t* from) {
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      for (int64_t i = 0; i < words; ++i) unpack8(*from++, &codes[pixel * codes_width + i * 8]);
    }
  }

  int64_t q, pixels, filters, words, vectors, width, codes_width;
  std::vector<A> values;
  std::vector<uint8_t> codes;
};

}  // namespace braze::cpu
