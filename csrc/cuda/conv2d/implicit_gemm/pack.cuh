// The tensor-core kernels gather 16-byte vectors of channels. Operands that are not laid out so
// (channels not fastest, or not a multiple of the vector) are first packed into the workspace: one
// pass over the tensor, against the taps' passes of the convolution itself.
#pragma once

#include "cuda/conv2d/gather.cuh"

namespace braze::cuda {

struct PackedConv2d {
  Conv2dArgs
      args;  // of the packed convolution: channels padded with zeros, tensors in the workspace
  bool pack_gathered, pack_other, unpack_out;
  int64_t bytes;  // of the packed tensors, which lie at the workspace's start
};

// What is packed, and where in the workspace it lies (which may be nullptr to learn the bytes).
PackedConv2d pack_into(const Conv2dArgs& args, void* workspace);

// Copies what is to be packed; `args` are those that pack_into was given.
void pack_operands(Stream stream, const Conv2dArgs& args, const PackedConv2d& packed);
void unpack_result(Stream stream, const Conv2dArgs& args, const PackedConv2d& packed);

}  // namespace braze::cuda
