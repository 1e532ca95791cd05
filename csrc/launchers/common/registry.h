// The kernel registry: what braze.kernels() lists; libbraze_ops_* and libbraze_cuda* each hold a
// list of their own. An op with a choice of kernels has one table of them, whose rows register
// themselves; all others name their one kernel.
#pragma once

#include <cstddef>
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

// A row of an op's table is the kernel's KernelInfo, or has it as its member `info`.
constexpr const KernelInfo& info_of(const KernelInfo& row) { return row; }
template <typename Row>
constexpr const KernelInfo& info_of(const Row& row) {
  return row.info;
}

// Registers the first `count` rows of a table.
struct KernelEntries {
  template <typename Row>
  KernelEntries(const Row* rows, int count) {
    for (int i = 0; i < count; ++i) kernel_registry().push_back(info_of(rows[i]));
  }
};

// A kernel's number is that of its row; in the place of one: whichever is the fastest.
constexpr int kAnyKernel = -1;

// The row of that name, at compile time.
template <typename Row, size_t kCount>
constexpr int kernel_number(const Row (&rows)[kCount], const char* name) {
  for (size_t i = 0; i < kCount; ++i) {
    const char *a = info_of(rows[i]).name, *b = name;
    while (*a && *a == *b) ++a, ++b;
    if (*a == *b) return static_cast<int>(i);
  }
  throw "there is no kernel of that name";
}

}  // namespace braze
