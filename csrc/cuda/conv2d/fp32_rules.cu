// Which of our own kernels is the fastest in fp32 at fp32's accuracy, and whether it is faster than
// cuDNN: as measured on an H200 (benchmarks/convolutions.py, the 161 layers of eight networks at
// batch 64, channels last). Products in parts are 1.2 to 5 times as fast as cuDNN's on CUDA cores.
#include <algorithm>

#include "rules.h"

namespace braze::cuda {

namespace {

constexpr int64_t kBatch = 64;  // of the measurements
int64_t pixels_of(const Conv2dShape& s) { return s.n * s.p * s.q; }

// 1 x 1 filters. Planes of parts are written and read again: kernels that split what they have read
// win where that is most of the work.
int fastest_product(Conv2dPass pass, const Conv2dShape& s) {
  const int64_t pixels = pixels_of(s), least = std::min(s.c, s.k), most = std::max(s.c, s.k);
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
  if (least < 64 && few && !is_strided(s)) return kPointwise;
  if (least <= (is_strided(s) ? 128 : 64)) return most > 64 ? kSimt : kPointwise;
  // Where its splits of the sum fill the waves: 1.1 to 1.2 times as fast as implicit_gemm_wgmma.
  if (is_strided(s)) return least >= 512 && !many ? kPointwise : kIm2col;
  const bool fills =
      pixels <= kBatch * 7 * 7 ? most >= 672 && most <= 992 : few && most >= 416 && most <= 592;
  return least <= 128 && fills ? kPointwise : kIm2col;
}

}  // namespace

bool is_known_in_fp32(const Conv2dShape& s) {
  if (!is_plain_fp32(s) || s.groups > 1 || std::min(s.c, s.k) < 16) return false;
  if (s.dilation_h > 1 || s.dilation_w > 1 || std::max(s.stride_h, s.stride_w) > 2) return false;
  if (is_pointwise(s)) return s.c >= 64 && pixels_of(s) >= kBatch * 7 * 6;
  return s.r == 3 && s.s == 3 && pixels_of(s) >= kBatch * 3 * 3;
}

int fastest_own_in_fp32(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (is_pointwise(s)) return fastest_product(args.pass, s);
  if (is_strided(s)) return kIm2col;
  const int64_t pixels = pixels_of(s);
  // Of few channels to many a kernel that splits tiles multiplies rows that are half empty.
  const bool forward = args.pass == Conv2dPass::kFprop;
  const int64_t from = forward ? s.c : s.k, to = forward ? s.k : s.c;
  if (args.pass != Conv2dPass::kWgrad && from <= 32 && to >= 96 && pixels > kBatch * 14 * 14) {
    return kIm2col;
  }
  if (args.pass == Conv2dPass::kDgrad) {
    const bool tiny = pixels <= kBatch * 3 * 3 || (pixels <= kBatch * 7 * 7 && s.c < 64);
    return tiny && takes(kSimt, args) && !takes(kHalo, args) ? kSimt : -1;
  }
  if (args.pass == Conv2dPass::kFprop) return -1;
  // A tile of pixels is split once for all taps, but in three parts: planes have two.
  if (pixels <= kBatch * 4 * 4) return kIm2col;
  return std::min(s.c, s.k) < 96 ? kHalo : kIm2col;
}

namespace {

// Whether planes of parts, which implicit_gemm_wgmma and pointwise multiply, take more workspace
// than cuDNN is given (libraries/cudnn_plans.h).
bool has_large_planes(const Conv2dProblem& problem) {
  constexpr int64_t kMostBytes = int64_t{2} << 30, kPartBytes = 4;
  const Conv2dShape& s = problem.shape;
  const int64_t x = s.n * s.h * s.w * s.c, y = s.n * s.p * s.q * s.k;
  const bool reads_x = problem.pass != Conv2dPass::kDgrad;
  const bool reads_y = problem.pass != Conv2dPass::kFprop;
  return kPartBytes * (reads_x * x + reads_y * y) > kMostBytes;
}

}  // namespace

// Weight gradients of 1 x 1 with few filters are read, split and written in the time that cuDNN
// multiplies them in.
bool beats_cudnn_in_fp32(const Conv2dProblem& problem, int kernel) {
  const Conv2dShape& s = problem.shape;
  if ((kernel == kIm2col || kernel == kPointwise) && has_large_planes(problem)) return false;
  if (!is_pointwise(s) || problem.pass != Conv2dPass::kWgrad) return true;
  const int64_t least = std::min(s.c, s.k), pixels = pixels_of(s);
  if (least == 64 && s.k > s.c && pixels > kBatch * 28 * 28) return false;
  return least > 32 || pixels <= kBatch * 7 * 7 || (least <= 16 && pixels <= kBatch * 14 * 14);
}

}  // namespace braze::cuda
