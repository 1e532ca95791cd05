// The kernel registry: what braze.kernels() lists. Each launcher file registers its kernels with a
// static KernelEntry; libbraze_ops_* and libbraze_cuda* each hold a list of their own.
#pragma once

#include <vector>

namespace braze {

struct KernelInfo {
  const char* op;      // "relu"
  const char* name;    // "vectorized": what braze.backend() takes for an op with a choice
  const char* dtypes;  // "float64 float32 bfloat16 float16"
  const char* arch;    // "cpu", "sm_80+", "sm_90a"
  bool shipped;        // false for ladder rungs, which "auto" does not prefer
  const char* note;    // one line
};

inline std::vector<KernelInfo>& kernel_registry() {
  static std::vector<KernelInfo> list;
  return list;
}

struct KernelEntry {
  explicit KernelEntry(const KernelInfo& info) { kernel_registry().push_back(info); }
};

}  // namespace braze
