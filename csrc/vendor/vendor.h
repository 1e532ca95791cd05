// Vendor libraries behind the launchers' own signatures. They are loaded at run time (the copies
// that torch has loaded); none is linked, and a missing one disables only its backend.
#pragma once

#include "kernels/conv2d/conv2d.h"
#include "kernels/matmul/matmul.h"

namespace braze::vendor {

// Why cuBLASLt (cuDNN) cannot be used here, or an empty string where it can.
const std::string& cublas_missing();
const std::string& cudnn_missing();

// Whether cuBLASLt takes these arguments (dtype, strides).
bool cublas_supports(const MatmulArgs& args);
int64_t cublas_workspace_bytes(const MatmulArgs& args);
void cublas_matmul(Stream stream, const MatmulArgs& args, void* workspace);

// Whether cuDNN has an engine for this pass. Plans are cached per shape, layout and device.
bool cudnn_supports(cuda::Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                    const Tensor4dRef& w, const Tensor4dRef& y);
int64_t cudnn_workspace_bytes(cuda::Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                              const Tensor4dRef& w, const Tensor4dRef& y);
// x, w, y as in Conv2dShape's formula, in every pass: the result is y, x or w.
void cudnn_conv2d(Stream stream, cuda::Conv2dPass pass, const Conv2dShape& shape,
                  const Tensor4dRef& x, const Tensor4dRef& w, const Tensor4dRef& y,
                  void* workspace);

}  // namespace braze::vendor
