#pragma once

#include "launchers/common/moments.h"
#include "launchers/common/types.h"

namespace braze {

// A 4-D tensor addressed by strides counted in elements. Dense NCHW and dense NHWC are the fast
// cases; any positive strides are correct.
struct Tensor4dRef {
  const void* data;
  int64_t n, c, h, w;  // strides
};

// y[n, k, p, q] = bias[k] + sum over c, r, s of
//     x[n, group * C/groups + c, p * stride_h - pad_h + r * dilation_h, ...] * w[k, c, r, s]
// Names as in the literature: input N C H W, filter K C/groups R S, output N K P Q.
struct Conv2dShape {
  DType dtype;
  int64_t n, c, h, w;  // input extents
  int64_t k, r, s;     // filters, filter height and width
  int64_t p, q;        // output height and width
  int64_t stride_h, stride_w;
  int64_t pad_h, pad_w;  // at the top and at the left; the bottom and right follow from p and q
  int64_t dilation_h, dilation_w;
  int64_t groups;
  bool allow_tf32;     // fp32 inputs may be rounded to TF32
  bool deterministic;  // measured kernel choices are ignored
};

namespace BRAZE_DEVICE {

// Which of the three products.
enum class Conv2dPass { kFprop, kDgrad, kWgrad };

// Bytes of workspace wanted by a pass with that kernel (0: none), for example for split-K. The
// references must be those of the launch, data pointers included: what is not aligned is packed.
int64_t conv2d_workspace_bytes(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                               const Tensor4dRef& w, const Tensor4dRef& y,
                               const std::string& kernel);

#ifdef BRAZE_CUDA
// The name of the kernel that "auto" picks.
const char* conv2d_auto_kernel(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                               const Tensor4dRef& w, const Tensor4dRef& y);
#endif

// How many sets of moments per filter that kernel leaves of fprop's result; 0: none.
int conv2d_moment_sets(const Conv2dShape& shape, const Tensor4dRef& x, const Tensor4dRef& w,
                       const Tensor4dRef& y, const std::string& kernel);

// kernel: "auto" picks by shape, dtype and architecture among the shipped kernels; else the
// registered name of one kernel. Throws where that kernel cannot take the arguments. In each pass
// the data pointer of the result's reference is written in full and never read. moments: nullptr,
// or room for conv2d_moment_sets (not 0) of them for each filter.
void conv2d_fprop(Stream stream, const Conv2dShape& shape, const Tensor4dRef& x,
                  const Tensor4dRef& w, const void* bias, const Tensor4dRef& y,
                  const std::string& kernel, void* workspace, Moments* moments = nullptr);
void conv2d_dgrad(Stream stream, const Conv2dShape& shape, const Tensor4dRef& dy,
                  const Tensor4dRef& w, const Tensor4dRef& dx, const std::string& kernel,
                  void* workspace);
void conv2d_wgrad(Stream stream, const Conv2dShape& shape, const Tensor4dRef& dy,
                  const Tensor4dRef& x, const Tensor4dRef& dw, const std::string& kernel,
                  void* workspace);

// out[k] = sum over n, p, q of dy[n, k, p, q]: the bias gradient. Deterministic.
int64_t channel_sum_workspace_bytes(DType dtype, int64_t n, int64_t c, int64_t h, int64_t w);
void channel_sum(Stream stream, DType dtype, int64_t n, int64_t c, int64_t h, int64_t w,
                 const Tensor4dRef& dy, void* out, void* workspace);

}  // namespace BRAZE_DEVICE
}  // namespace braze
