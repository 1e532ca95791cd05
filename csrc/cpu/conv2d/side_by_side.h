// Convolutions whose windows lie side by side, as 1 x 1 convolutions of patches.
#pragma once

#include "launchers/conv2d_patches.h"

namespace braze::cpu {

// Images as matrices of patches, a row each, in the order of a filter's weights.
class Patches {
 public:
  explicit Patches(const Conv2dProblem& problem) : problem_(problem) {}

  // Of the matrix; 0 where images of a single patch are that as they are.
  int64_t bytes() const;
  // The 1 x 1 convolution.
  Conv2dProblem product(void* matrix) const;
  // From the images to the matrix, or for an input gradient back.
  void move(void* matrix) const;

 private:
  bool is_matrix() const { return images_are_patches(problem_.shape, problem_.x, problem_.w); }

  const Conv2dProblem& problem_;
};

}  // namespace braze::cpu
