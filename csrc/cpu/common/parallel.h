// Threading through libtorch's own pool (at::parallel_for), so that torch.set_num_threads holds and
// no second pool competes for the cores. Declared here because csrc/cpu includes no torch header.
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>

extern "C" {
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                           void (*callback)(int64_t, int64_t, void*), void* context);
int32_t torch_get_num_threads(uint32_t* threads);
}

namespace braze::cpu {

// Calls f(first, last) on disjoint ranges that cover [begin, end), each at least `grain` long
// except the last. f must not throw.
template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (begin >= end) return;
  const auto callback = [](int64_t first, int64_t last, void* context) {
    (*static_cast<const F*>(context))(first, last);
  };
  if (torch_parallel_for(begin, end, grain, callback, const_cast<F*>(&f)) != 0) {
    throw std::runtime_error("braze: at::parallel_for failed");
  }
}

inline int64_t num_threads() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return threads;
}

}  // namespace braze::cpu
