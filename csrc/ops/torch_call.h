// Calls torch's own ops, through its dispatcher.
#pragma once

#include <array>

#include "ops/common.h"

namespace braze {

// Calls one; returns its first kResults results, which are all that it has.
template <size_t kResults, typename... Args>
std::array<Tensor, kResults> call_torch(const char* op, const char* overload, const Args&... args) {
  static_assert(kResults <= sizeof...(Args));
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  std::array<Tensor, kResults> results;
  for (size_t i = 0; i < kResults; ++i) {
    results[i] = torch::stable::detail::to<Tensor>(stack[i]);
  }
  return results;
}

}  // namespace braze
