// Convolutions whose windows lie side by side, as 1 x 1 convolutions of patches.
#pragma once

#include "launchers/conv2d.h"

namespace braze::cpu {

// Images as matrices of patches, a row each, in the order of a filter's weights.
class Patches {
 public:
  explicit Patches(const Conv2dProblem& problem) : problem_(problem) {}

  // Why the problem's are none, or nullptr.
  const char* obstacle() const;
  // Of the matrix; 0 where images of a single patch are that as they are.
  int64_t bytes() const;
  // The 1 x 1 convolution.
  Conv2dProblem product(void* matrix) const;
  // From the images to the matrix, or for an input gradient back.
  void move(void* matrix) const;

 private:
  int64_t weights() const;  // of a filter
  bool has_weights_channels_last() const;
  bool has_weights_contiguous() const;
  bool is_matrix() const;

  const Conv2dProblem& problem_;
};

}  // namespace braze::cpu
