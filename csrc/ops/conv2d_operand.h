// The tensors of a convolution as its launchers take them. For conv2d.cpp alone.
#pragma once

#include "launchers/transpose.h"
#include "ops/conv2d_decision.h"

namespace braze {
namespace {

// A tensor as the launchers see it. Strides of dimensions of size 1, arbitrary in torch, are those
// of a dense tensor in the convolution's memory format, so that one channel fits either.
struct Operand {
  Operand(const Tensor& t, bool channels_last) : tensor(t) {
    int64_t strides[4], dense = 1;
    const int order[2][4] = {{3, 2, 1, 0}, {1, 3, 2, 0}};
    for (const int d : order[channels_last]) {
      strides[d] = t.size(d) == 1 ? dense : t.stride(d);
      if (strides[d] != dense) is_dense = false;
      dense *= t.size(d);
    }
    ref = {t.const_data_ptr(), strides[0], strides[1], strides[2], strides[3]};
  }
  bool expanded() const { return ref.n == 0 || ref.c == 0 || ref.h == 0 || ref.w == 0; }

  Tensor tensor;
  bool is_dense = true;  // in the convolution's format
  Tensor4dRef ref;
};

Tensor empty_like_4d(const Tensor& t, bool channels_last) {
  return empty_4d({t.size(0), t.size(1), t.size(2), t.size(3)}, t, channels_last);
}

// A copy of its elements in the convolution's format: a transposition of each image, where the
// other format is what they are in. It is written to `memory`, if given.
Operand dense(Stream stream, const Operand& o, bool channels_last,
              const std::optional<Tensor>& memory = std::nullopt) {
  if (o.is_dense) return o;
  const Tensor& t = o.tensor;
  const int64_t channels = t.size(1), pixels = t.size(2) * t.size(3);
  Tensor copy = memory ? *memory : empty_like_4d(t, channels_last);
  if (Operand(t, !channels_last).is_dense) {
    dev::transpose_copy(stream, dtype_of("conv2d", "input", t), t.const_data_ptr(),
                        copy.mutable_data_ptr(), t.size(0), channels_last ? channels : pixels,
                        channels_last ? pixels : channels);
  } else {
    torch::stable::copy_(copy, t);
  }
  return Operand(copy, channels_last);
}

// Memory for these tensors in channels_last; none where there is not enough for all of them.
std::vector<Tensor> channels_last_memory(std::initializer_list<const Tensor*> tensors) {
  std::vector<Tensor> memory;
  try {
    for (const Tensor* t : tensors) memory.push_back(empty_like_4d(*t, true));
  } catch (const std::runtime_error&) {  // out of memory
    memory.clear();
  }
  return memory;
}

// An input as it is, where a launcher can take it. cuDNN, where asked for by name, gets it dense.
Operand operand(Stream stream, const Tensor& t, bool channels_last, const Wish& wish) {
  const Operand o(t, channels_last);
  return o.expanded() || wish.kind == Wish::kLibrary ? dense(stream, o, channels_last) : o;
}

// The result's gradient. As torch does, CUDA's kernels of both gradients want the convolution's own
// format. Those of the CPU copy what they read, from either.
Operand output_gradient(Stream stream, const Tensor& t, bool channels_last) {
  const Operand o(t, channels_last);
#ifndef BRAZE_CUDA
  if (Operand(t, true).is_dense) return Operand(t, true);
#endif
  return dense(stream, o, channels_last);
}

}  // namespace
}  // namespace braze
