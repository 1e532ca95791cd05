// Division of a non-negative 31-bit index by a divisor that is fixed for a launch: one
// multiply-high, one add and one shift instead of some twenty instructions. Method: Granlund and
// Montgomery, "Division by invariant integers using multiplication" (1994).
#pragma once

#include <cstdint>

namespace braze::cuda {

class FastDiv {
 public:
  FastDiv() = default;
  // 1 <= divisor < 2^31; an empty extent, 0, counts as 1
  explicit FastDiv(int64_t divisor) : divisor_(divisor > 0 ? static_cast<uint32_t>(divisor) : 1) {
    while ((uint64_t{1} << shift_) < divisor_) ++shift_;
    const uint64_t power = uint64_t{1} << shift_;
    multiplier_ = static_cast<uint32_t>((power - divisor_) * (uint64_t{1} << 32) / divisor_ + 1);
  }

  // quotient and remainder of 0 <= i < 2^31
  __device__ __forceinline__ int div(int i) const {
    const uint32_t n = static_cast<uint32_t>(i);
    return static_cast<int>((__umulhi(n, multiplier_) + n) >> shift_);
  }
  __device__ __forceinline__ int div(int i, int& remainder) const {
    const int quotient = div(i);
    remainder = i - quotient * static_cast<int>(divisor_);
    return quotient;
  }
  __host__ __device__ int divisor() const { return static_cast<int>(divisor_); }

 private:
  uint32_t divisor_ = 1, multiplier_ = 1, shift_ = 0;
};

}  // namespace braze::cuda
