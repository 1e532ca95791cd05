// What the two backends share: finding a library at run time, and setting it up in a capture.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace braze::vendor {

// Opens a shared library by soname: the copy that the process has loaded already (torch's), else
// the one that the dynamic linker finds. Never closed: its kernels may still be in use.
// Returns nullptr and says why in `missing`.
inline void* open_library(const std::string& soname, std::string* missing) {
  void* handle = dlopen(soname.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!handle) handle = dlopen(soname.c_str(), RTLD_NOW);
  if (!handle) {
    const char* error = dlerror();
    *missing = soname + " not found" + (error ? std::string(" (") + error + ")" : "");
  }
  return handle;
}

template <typename Function>
bool load_symbol(void* library, const char* name, Function** function, std::string* missing) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  if (!*function) *missing = std::string("the library has no symbol ") + name;
  return *function != nullptr;
}

// 130100 -> "13.1.0", the form in which both libraries report their version.
inline std::string dotted_version(int64_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

inline int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// The largest power of two, at most `limit`, that divides the address.
inline int64_t alignment_of(const void* p, int64_t limit) {
  const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p));
  return address ? std::min(address & -address, limit) : limit;
}

constexpr int64_t kWorkspaceAlignment = 256;  // of a workspace and of its parts

inline int64_t align_up(int64_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

// While a graph is captured, calls that may synchronise (allocating a handle, loading a kernel) are
// refused, although they do not touch the capturing stream. Allows them for a scope and a thread.
class AllowSetupInCapture {
 public:
  AllowSetupInCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowSetupInCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowSetupInCapture(const AllowSetupInCapture&) = delete;
  AllowSetupInCapture& operator=(const AllowSetupInCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace braze::vendor
