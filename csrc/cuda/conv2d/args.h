// A pass of a convolution as its kernels see it.
#pragma once

#include "launchers/conv2d.h"

namespace braze::cuda {

// What a pass reads twice over: `gathered` (x, or dy for dgrad), the other operand, the result.
struct Conv2dArgs {
  Conv2dPass pass;
  Conv2dShape shape;
  Tensor4dRef gathered, other, out;
  const void* bias;
  Moments* moments = nullptr;  // of fprop's result
  bool relu = false;           // fprop's
  const Conv2dTail* tail = nullptr;
};

// Channels are the fastest dimension of the gathered tensor.
inline bool is_channels_last(const Conv2dArgs& p) {
  const int64_t channels = p.pass == Conv2dPass::kDgrad ? p.shape.k : p.shape.c;
  return p.gathered.c == 1 && channels / p.shape.groups > 1;
}

inline Conv2dArgs args_of(const Conv2dProblem& p, const Conv2dEpilogue& e = {}) {
  switch (p.pass) {
    case Conv2dPass::kFprop:
      return {p.pass, p.shape, p.x, p.w, p.y, e.bias, e.moments, e.relu, e.tail};
    case Conv2dPass::kDgrad: return {p.pass, p.shape, p.y, p.w, p.x, nullptr};
    case Conv2dPass::kWgrad: break;
  }
  return {p.pass, p.shape, p.x, p.y, p.w, nullptr};
}

}  // namespace braze::cuda
