// The weight gradient of contiguous images (folded.cuh).
#pragma once

#include "launchers/common/types.h"

namespace braze::cuda::pointwise {

// C (m x n, dense) = sum over images of A (m x pixels) times transposed B (n x pixels), whose rows
// have no gaps.
struct FoldedProduct {
  DType dtype;
  int64_t images, pixels, m, n;
  const void *a, *b;
  int64_t a_image, b_image;  // strides
  void* c;
};

// Why it cannot be taken, or nullptr.
const char* folded_obstacle(const FoldedProduct& product, bool allow_tf32);
int64_t folded_workspace_bytes(const FoldedProduct& product);
void run_folded(Stream stream, const FoldedProduct& product, void* workspace);

}  // namespace braze::cuda::pointwise
