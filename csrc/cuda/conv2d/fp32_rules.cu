// Which of our own kernels is the fastest in fp32 at fp32's accuracy, and whether it is faster than
// cuDNN: as measured on an H200 (benchmarks/convolutions.py, the 161 layers of eight networks at
// batch 64, channels last). Products in parts are 1.2 to 5 times as fast as cuDNN's on CUDA cores.
#include <algorithm>

#include "rules.h"

namespace braze::cuda {

namespace {

constexpr int64_t kBatch = 64;  // of the measurements

// 1 x 1 weight gradients of few channels over so many pixels that matmul's wgmma_long takes them.
bool is_long_sum(const Conv2dShape& s) {
  return is_pointwise(s) && !is_strided(s) && std::min(s.c, s.k) < 64 &&
         s.c * s.k * pixels_of(s) >= int64_t{1} << 28;
}

// 1 x 1 filters. Planes of parts are written and read again: kernels that split what they have read
// win where that is most of the work.
int fastest_product(Conv2dPass pass, const Conv2dShape& s) {
  const int64_t pixels = pixels_of(s);
  const bool few = pixels <= kBatch * 14 * 14, many = pixels > kBatch * 28 * 28;
  switch (pass) {
    case Conv2dPass::kFprop:
      if (is_strided(s)) return kPointwise;
      if (s.k <= 64 && few) return kPointwise;
      if (s.k < 64) return kSimt;
      return s.c <= 96 && many ? kHalo : kIm2col;
    case Conv2dPass::kDgrad:
      if (is_strided(s)) return kIm2col;
      if (s.k < 64) return kPointwise;
      if (s.c == 64) return s.k <= 128 ? kHalo : kIm2col;
      return s.k <= 96 && s.c <= 256 && !few ? kHalo : kIm2col;
    case Conv2dPass::kWgrad: break;
  }
  // Large results of short sums: planes of parts, with half of the products, are soon made.
  const bool large = s.c * s.k >= int64_t{1} << 19 && !is_strided(s);
  return large && pixels <= kBatch * 14 * 14 ? kIm2col : kPointwise;
}

}  // namespace

// Whether planes of parts, which implicit_gemm_wgmma and pointwise multiply, take more workspace
// than cuDNN is given.
bool has_large_planes(Conv2dPass pass, const Conv2dShape& s) {
  constexpr int64_t kPartBytes = 4;
  const int64_t x = s.n * s.h * s.w * s.c, y = s.n * s.p * s.q * s.k;
  const bool reads_x = pass != Conv2dPass::kDgrad;
  const bool reads_y = pass != Conv2dPass::kFprop;
  return kPartBytes * (reads_x * x + reads_y * y) > kMostWorkspace;
}

bool is_known_in_fp32(Conv2dPass pass, const Conv2dShape& s) {
  if (!is_plain_fp32(s) || s.groups > 1) return false;
  if (pass == Conv2dPass::kWgrad && is_long_sum(s)) return true;
  if (std::min(s.c, s.k) < 16) return false;
  if (s.dilation_h > 1 || s.dilation_w > 1 || std::max(s.stride_h, s.stride_w) > 2) return false;
  if (is_pointwise(s)) return s.c >= 64 && pixels_of(s) >= kBatch * 7 * 6;
  // Few channels that no other kernel of ours takes are cuDNN's.
  const bool even = s.c % 4 == 0 && s.k % 4 == 0;
  if (pass == Conv2dPass::kFprop && std::max(s.c, s.k) < 32 && !even) return false;
  return s.r == 3 && s.s == 3 && pixels_of(s) >= kBatch * 3 * 3;
}

int fastest_own_in_fp32(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (is_pointwise(s)) return fastest_product(args.pass, s);
  if (is_strided(s)) return kIm2col;
  const int64_t pixels = pixels_of(s);
  const bool few = pixels <= kBatch * 14 * 14;
  // Of few channels to many a kernel that splits tiles multiplies rows that are half empty.
  const bool forward = args.pass == Conv2dPass::kFprop;
  const int64_t from = forward ? s.c : s.k, to = forward ? s.k : s.c;
  if (args.pass != Conv2dPass::kWgrad && from <= 32 && to >= 96 && !few) return kIm2col;
  if (args.pass == Conv2dPass::kDgrad) {
    const bool tiny = pixels <= kBatch * 3 * 3 || (pixels <= kBatch * 7 * 7 && s.c < 64);
    if (tiny && !takes(kHalo, args)) return kIm2col;
    return !tiny && few && s.c >= 128 ? kIm2col : -1;
  }
  if (args.pass == Conv2dPass::kFprop) {
    // In pieces of 32 channels halo_wgmma splits and adds up more than implicit_gemm_wgmma.
    return s.c > 32 && !has_large_planes(args.pass, s) ? kIm2col : -1;
  }
  // A tile of pixels is split once for all taps, but in three parts: planes have two.
  if (pixels <= kBatch * 4 * 4) return kIm2col;
  return std::min(s.c, s.k) < 96 ? kHalo : kIm2col;
}

bool beats_cudnn_in_fp32(const Conv2dProblem& problem, int kernel) {
  // pointwise splits what a weight gradient reads on its way to the tensor cores.
  const bool wgrad = problem.pass == Conv2dPass::kWgrad;
  const bool has_planes = kernel == kIm2col || (kernel == kPointwise && !wgrad);
  return !(has_planes && has_large_planes(problem.pass, problem.shape));
}

}  // namespace braze::cuda
