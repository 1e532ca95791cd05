// The gradient of a convolution's bias: the sum of each channel.
#include <algorithm>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"
#include "launchers/conv2d.h"

namespace braze::cpu {
namespace {

// Images that a task sums before the partial sums are added, the same for any number of threads.
constexpr int64_t kSumImages = 16;

// sums[c] += the sum of channel c of an image. Runs of pixels are summed first (in `row`, c
// values), and their sums in float64: short chains of additions round less.
template <typename T>
void sum_image(double* __restrict__ sums, acc_t<T>* __restrict__ row, const T* dy,
               const Tensor4dRef& s, int64_t channels, int64_t height, int64_t width) {
  using Acc = acc_t<T>;
  if (s.w == 1 && s.h == width) {  // a plane without gaps is one long row
    width *= height;
    height = 1;
  }
  for (int64_t i = 0; i < height; ++i, dy += s.h) {
    if (s.c == 1 && s.w != 1) {
      constexpr int64_t kRun = 32;
      for (int64_t first = 0; first < width; first += kRun) {
        std::fill_n(row, channels, Acc(0));
        for (int64_t j = first; j < std::min(width, first + kRun); ++j) {
          for (int64_t c = 0; c < channels; ++c) row[c] += Acc(dy[j * s.w + c]);
        }
        for (int64_t c = 0; c < channels; ++c) sums[c] += row[c];
      }
      continue;
    }
    for (int64_t c = 0; c < channels; ++c) {
      const T* from = dy + c * s.c;
      vec8_t<Acc> lanes[4] = {};
      int64_t j = 0;
      if (s.w == 1) {
        for (; j + 32 <= width; j += 32) {
          for (int l = 0; l < 4; ++l) lanes[l] += load8(from + j + 8 * l);
        }
        for (; j + 8 <= width; j += 8) lanes[0] += load8(from + j);
      } else {
        for (; j + 8 <= width; j += 8) {
          for (int l = 0; l < 8; ++l) lanes[0][l] += Acc(from[(j + l) * s.w]);
        }
      }
      lanes[0] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
      Acc sum = 0;
      for (; j < width; ++j) sum += Acc(from[j * s.w]);
      for (int l = 0; l < 8; ++l) sum += lanes[0][l];
      sums[c] += sum;
    }
  }
}

}  // namespace

int64_t channel_sum_workspace_bytes(DType dtype, int64_t n, int64_t c, int64_t, int64_t) {
  // Per block of images, c sums in float64 and c values of a row.
  return ceil_div(n, kSumImages) * c * (8 + (dtype == DType::kFloat64 ? 8 : 4));
}

void channel_sum(Stream, DType dtype, int64_t n, int64_t c, int64_t h, int64_t w,
                 const Tensor4dRef& dy, void* out, void* workspace) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Acc = acc_t<T>;
    const T* data = static_cast<const T*>(dy.data);
    const int64_t blocks = ceil_div(n, kSumImages);
    double* partial = static_cast<double*>(workspace);
    Acc* rows = reinterpret_cast<Acc*>(partial + blocks * c);
    parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        double* sums = partial + block * c;
        Acc* row = rows + block * c;
        std::fill_n(sums, c, 0.0);
        for (int64_t i = block * kSumImages; i < std::min(n, (block + 1) * kSumImages); ++i) {
          sum_image(sums, row, data + i * dy.n, dy, c, h, w);
        }
      }
    });
    for (int64_t j = 0; j < c; ++j) {
      double sum = 0;
      for (int64_t block = 0; block < blocks; ++block) sum += partial[block * c + j];
      static_cast<T*>(out)[j] = T(static_cast<Acc>(sum));
    }
  });
}

}  // namespace braze::cpu
