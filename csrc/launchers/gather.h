#pragma once

#include "launchers/common/types.h"
#include "launchers/conv_bn_relu_max_pool2d.h"

namespace braze {

struct GatherArgs {
  DType dtype;            // of the batch
  const uint8_t* images;  // [count, channels, pixels], dense
  const int64_t* labels;  // [count]
  int64_t count;
  int64_t batch, channels, pixels;
  const int64_t* indices;  // [index_count]; the batch is the `batch` ones from *position on
  int64_t index_count;
  int64_t* position;   // null for 0; else [2]: see gather_images
  const void* scale;   // [channels], float64 for a float64 batch, else float32
  const void* shift;   // the same
  bool channels_last;  // the batch: [batch, pixels, channels] in memory
};

}  // namespace braze

namespace braze::BRAZE_DEVICE {

// batch_images[b] = images[i] * scale + shift per channel and batch_labels[b] = labels[i], i being
// indices[p + b] and p being *position. Afterwards *position is p + batch. position[1] is scratch
// of the CUDA kernel: 0 before and after.
//
// The arithmetic is float64 or float32 as the scale's; whether the product is rounded before the
// sum is the compiler's choice; then one rounding to dtype.
//
// An i outside [0, count), or a p + b outside [0, index_count): the CPU throws before anything is
// written; CUDA makes that image NaN and its label -1, and reads nothing.
//
// Where `patches` is not null and all can be one launch, small_k_sum_moments() of each patches->n
// images of the batch too, one behind the other. Returns whether `moments` have been written.
bool gather_images(Stream stream, const GatherArgs& args, void* batch_images, int64_t* batch_labels,
                   const SmallKShape* patches, double* moments);

}  // namespace braze::BRAZE_DEVICE
