// How the `backend` argument of an op names what is to run it.
#pragma once

#include <utility>

#include "launchers/common/multiprocessors.h"
#include "launchers/common/registry.h"
#include "ops/common.h"

#ifdef BRAZE_CUDA
#include "libraries/libraries.h"
#else
#include "ops/workspace_cache.h"
#endif

extern "C" int32_t torch_get_num_threads(uint32_t* threads);

namespace braze {

// Part of every key: the device and how many of its multiprocessors, or on the CPU how many
// threads, work is cut for.
inline int64_t plan_context([[maybe_unused]] const Tensor& t) {
#ifdef BRAZE_CUDA
  return int64_t{t.get_device_index()} << 32 | multiprocessor_limit;
#else
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return threads;
#endif
}

// Whether an op may take whatever kernel it has for its arguments.
inline bool leaves_choice(const std::string& backend) {
  return backend == "auto" || backend == "braze";
}

// `backend`, read once: the fastest of all ("auto"), of our own ("braze"), an algorithm of the
// vendor's library, or one kernel.
struct Wish {
  enum Kind : int8_t { kAuto, kOwn, kLibrary, kKernel };
  Kind kind = kAuto;
  int number = kAnyKernel;  // of the kernel, or of the library's algorithm

  int kernel() const { return kind == kKernel ? number : kAnyKernel; }
  bool leaves_choice() const { return kind == kAuto || kind == kOwn; }
};

// kernels: the op's table. library: "cublas", "cudnn", on a CPU "torch", or nullptr where none has
// the op. Throws for names that nothing on this device has.
inline Wish wish_of(const char* op, const std::string& backend, const KernelInfo* (*kernels)(int),
                    [[maybe_unused]] const char* library = nullptr) {
  if (backend == "auto") return {};
  if (backend == "braze") return {Wish::kOwn};
  std::string names = "auto, braze";
#ifndef BRAZE_CUDA
  if (library && library == std::string("torch")) {
    if (backend == library) return {Wish::kLibrary, 0};
    names += ", torch";
  }
#endif
  for (int i = 0; const KernelInfo* const info = kernels(i); ++i) {
    if (backend == info->name) return {Wish::kKernel, i};
    names += std::string(", ") + info->name;
  }
#ifdef BRAZE_CUDA
  const char* device = "CUDA";
  const int candidate = library ? vendor::candidate_of(backend, library) : -1;
  if (candidate >= 0) return {Wish::kLibrary, candidate};
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
#ifdef BRAZE_CUDA
  Workspace(int64_t bytes, const Tensor& like) {
    if (bytes <= 0) return;
    memory_ = empty({bytes}, like, ScalarType::Byte);
    data_ = memory_.mutable_data_ptr();
  }
  explicit Workspace(const Tensor& memory) : memory_(memory), data_(memory.mutable_data_ptr()) {}
  void* data() const { return data_; }
  const Tensor& memory() const { return memory_; }  // undefined where there is none

 private:
  Tensor memory_;
  void* data_ = nullptr;
#else
  Workspace(int64_t bytes, const Tensor&) {
    if (bytes > 0) block_ = borrow_workspace(bytes);
  }
  Workspace(Workspace&& other) : block_(std::exchange(other.block_, {})) {}
  Workspace& operator=(Workspace&& other) {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Workspace() {
    if (block_.data) give_back_workspace(block_);
  }
  void* data() const { return block_.data; }
  const Tensor& memory() const {  // for streams, which a CPU has none of
    static const Tensor none;
    return none;
  }

 private:
  WorkspaceBlock block_;
#endif
};

// A dense 4-D tensor that lives as long as an op works, of nobody else's knowledge: on a CPU in
// memory that is kept from call to call, as a Workspace is.
class WorkingTensor {
 public:
  WorkingTensor() = default;
#ifdef BRAZE_CUDA
  WorkingTensor(const std::vector<int64_t>& nchw, const Tensor& like, bool channels_last)
      : tensor_(empty_4d(nchw, like, channels_last)) {}
#else
  WorkingTensor(const std::vector<int64_t>& nchw, const Tensor& like, bool channels_last)
      : memory_(nchw[0] * nchw[1] * nchw[2] * nchw[3] * like.element_size(), like) {
    const std::vector<int64_t> strides =
        dense_strides(nchw, channels_last ? kChannelsLast : nullptr);
    tensor_ =
        torch::stable::from_blob(memory_.data(), nchw, strides, like.device(), like.scalar_type());
  }
#endif
  const Tensor& tensor() const { return tensor_; }

 private:
  Workspace memory_;
  Tensor tensor_;
};

}  // namespace braze
