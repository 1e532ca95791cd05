#pragma once

#include "launchers/conv2d.h"

namespace braze::cuda::halo {

// Whether the kernels take this pass: stride 1, dilation 1, one group, channels last (fp32 results:
// any strides), compute capability 9.0, all but fp64; weights and a tile of input that fit shared
// memory together; for the weight gradient filters of one to three
// rows and three columns. `in` is what the pass convolves (x, or dy for dgrad), `other` the weights
// (dy for the weight gradient).
bool supports(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& in,
              const Tensor4dRef& other, const Tensor4dRef& out);

// fprop and dgrad. Sets of moments that conv writes for each computed channel.
int moment_sets(Conv2dPass pass, const Conv2dShape& shape);

// bias, moments: may be null. moments: [computed channels][moment_sets], of the results as they are
// stored.
void conv(Stream stream, Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& in,
          const Tensor4dRef& w, const void* bias, const Tensor4dRef& out, Moments* moments);

// The input gradient for few channels, which conv() leaves to this kernel: its own would waste half
// of the products. supports_narrow_dgrad asks only what supports() does not.
bool supports_narrow_dgrad(const Conv2dShape& shape, const Tensor4dRef& w, const Tensor4dRef& dx);
void narrow_dgrad(Stream stream, const Conv2dShape& shape, const Tensor4dRef& dy,
                  const Tensor4dRef& w, const Tensor4dRef& dx);

// The weight gradient. Deterministic: blocks leave partial sums, added up in a fixed order.
bool supports_wgrad(const Conv2dShape& shape, const Tensor4dRef& x, const Tensor4dRef& dy);
int64_t wgrad_workspace_bytes(const Conv2dShape& shape);
void wgrad(Stream stream, const Conv2dShape& shape, const Tensor4dRef& dy, const Tensor4dRef& x,
           const Tensor4dRef& dw, void* workspace);

}  // namespace braze::cuda::halo
