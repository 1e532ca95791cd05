// How the `backend` argument of an op names a kernel.
#pragma once

#include "launchers/common/registry.h"
#include "ops/common.h"

namespace braze {

// What runs an op: the vendor library's algorithm of that number, or (vendor < 0) our own kernel.
struct KernelChoice {
  int vendor;
  std::string kernel;
};

// `backend` as an own kernel's name for the launcher: "auto" and "braze" leave the choice to it,
// anything else has to be registered for this device.
inline KernelChoice own_kernel(const std::string& op, const std::string& backend) {
  if (backend == "auto" || backend == "braze") return {-1, "auto"};
  std::string names = "auto, braze";
  for (const KernelInfo& info : kernel_registry()) {
    if (op != info.op) continue;
    if (backend == info.name) return {-1, backend};
    names += std::string(", ") + info.name;
  }
#ifdef BRAZE_CUDA
  const char* device = "CUDA";
#else
  const char* device = "CPU";
#endif
  BRAZE_CHECK(false, op, ": expected backend to be one of ", names, " for ", device,
              " tensors, but got ", backend);
  return {};  // not reached
}

// Memory for a launcher that wants `bytes` of it; a null pointer for none.
class Workspace {
 public:
  Workspace() = default;
  Workspace(int64_t bytes, const Tensor& like) {
    if (bytes <= 0) return;
    memory_ = empty({bytes}, like, ScalarType::Byte);
    data_ = memory_.mutable_data_ptr();
  }
  void* data() const { return data_; }
  const Tensor& memory() const { return memory_; }  // undefined where there is none

 private:
  Tensor memory_;
  void* data_ = nullptr;
};

}  // namespace braze
