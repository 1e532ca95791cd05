// cuDNN's graph API as a conv2d kernel: one graph of a single convolution (and the addition of a
// bias) per shape, layout and setting. It talks to the backend API itself; cudnn-frontend would
// bring a Python package to install, 40 s of compilation, and (1.26 still) wrong fp64 results.
#include "libraries/libraries.h"

#ifdef BRAZE_WITH_CUDNN

#include <memory>
#include <mutex>
#include <unordered_map>

#include "launchers/common/hash_words.h"
#include "libraries/cudnn_plans.h"

namespace braze::vendor {
namespace {

using cuda::Conv2dPass;

constexpr int kMaxDevices = 64;

// One handle and one cache per device. Neither a handle nor, with every engine, a plan may be used
// by two threads at once, so the lock is held while work is enqueued, a few microseconds.
class Device {
 public:
  template <typename F>
  static auto with_plans(const Problem& p, F&& f) {
    // Never destroyed: the driver may be gone when static objects are.
    static Device* const devices = new Device[kMaxDevices];
    Device& device = devices[current_device()];
    const std::lock_guard<std::mutex> lock(device.mutex_);
    if (!device.handle_) {
      const AllowSetupInCapture allow;
      check_cudnn(cudnn_api().create(&device.handle_), "create handle");
    }
    return f(device, device.plans_for(p));
  }

  void set_stream(cudaStream_t stream) {
    if (has_stream_ && stream == stream_) return;
    check_cudnn(cudnn_api().set_stream(handle_, stream), "set stream");
    stream_ = stream;
    has_stream_ = true;
  }

 private:
  // Plans are never freed: a captured CUDA graph may still launch their kernels.
  Plans& plans_for(const Problem& p) {
    const Problem::Key key = p.key();
    const auto found = cache_.find(key);
    if (found != cache_.end()) return *found->second;
    return *cache_.emplace(key, std::make_unique<Plans>(p, handle_)).first->second;
  }

  std::mutex mutex_;
  cudnnHandle_t handle_ = nullptr;
  cudaStream_t stream_ = nullptr;
  bool has_stream_ = false;
  std::unordered_map<Problem::Key, std::unique_ptr<Plans>, HashWords> cache_;
};

}  // namespace

const std::string& cudnn_missing() { return cudnn_api().missing; }

std::string cudnn_version() {
  return cudnn_missing().empty() ? dotted_version(cudnn_api().get_version()) : "";
}

bool cudnn_supports(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                    const Tensor4dRef& w, const Tensor4dRef& y, const void* bias, int candidate) {
  if (!cudnn_missing().empty()) return false;
  const Problem p(pass, shape, x, w, y, bias);
  // Sums over nothing are zeros: written without cuDNN.
  if (p.is_empty()) return p.result().numel() == 0 || (p.result().is_dense() && !bias);
  return p.possible &&
         Device::with_plans(p, [&](Device&, Plans& plans) { return plans.has(candidate); });
}

int64_t cudnn_workspace_bytes(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                              const Tensor4dRef& w, const Tensor4dRef& y, const void* bias,
                              int candidate) {
  if (!cudnn_missing().empty()) return 0;
  const Problem p(pass, shape, x, w, y, bias);
  if (p.is_empty() || !p.possible) return 0;
  return Device::with_plans(p, [&](Device&, Plans& plans) {
    return plans.has(candidate) ? align_up(plans.workspace_bytes(candidate)) + p.copy_bytes() : 0;
  });
}

void cudnn_conv2d(Stream stream, Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                  const Tensor4dRef& w, const Tensor4dRef& y, void* workspace, const void* bias,
                  int candidate) {
  if (!cudnn_missing().empty()) throw std::runtime_error("cudnn: " + cudnn_missing());
  const Problem p(pass, shape, x, w, y, bias);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto unsupported = [&] {
    return std::runtime_error("cudnn: no engine number " + std::to_string(candidate) +
                              " for this shape, layout and precision");
  };
  if (p.is_empty()) {
    if (p.result().numel() == 0) return;
    if (!p.result().is_dense() || bias) throw unsupported();
    const Tensor4dRef& result = pass == Conv2dPass::kFprop ? y : pass == Conv2dPass::kDgrad ? x : w;
    check_cuda(cudaMemsetAsync(const_cast<void*>(result.data), 0,
                               p.result().numel() * size_of(shape.dtype), cuda_stream),
               "cudnn: zeros");
    return;
  }
  if (!p.possible) throw unsupported();
  Device::with_plans(p, [&](Device& device, Plans& plans) {
    if (!plans.has(candidate)) throw unsupported();
    char* copies = static_cast<char*>(workspace) + align_up(plans.workspace_bytes(candidate));
    const auto aligned = [&](const void* data, int64_t numel) -> const void* {
      if (!data || Problem::is_aligned(data)) return data;
      void* const copy = copies;
      const int64_t bytes = numel * size_of(shape.dtype);
      check_cuda(cudaMemcpyAsync(copy, data, bytes, cudaMemcpyDeviceToDevice, cuda_stream),
                 "cudnn: aligned copy");
      copies += align_up(bytes);
      return copy;
    };
    device.set_stream(cuda_stream);
    plans.run(aligned(x.data, p.x.numel()), aligned(w.data, p.w.numel()),
              aligned(y.data, p.y.numel()), aligned(bias, shape.k), workspace, candidate);
  });
}

}  // namespace braze::vendor

#else  // built without cudnn.h

namespace braze::vendor {

const std::string& cudnn_missing() {
  static const std::string reason =
      "braze was built without cudnn.h: pip install --no-deps -r requirements-build-cuda12.txt (or "
      "13), then "
      "build again";
  return reason;
}
std::string cudnn_version() { return ""; }
bool cudnn_supports(cuda::Conv2dPass, const Conv2dShape&, const Tensor4dRef&, const Tensor4dRef&,
                    const Tensor4dRef&, const void*, int) {
  return false;
}
int64_t cudnn_workspace_bytes(cuda::Conv2dPass, const Conv2dShape&, const Tensor4dRef&,
                              const Tensor4dRef&, const Tensor4dRef&, const void*, int) {
  return 0;
}
void cudnn_conv2d(Stream, cuda::Conv2dPass, const Conv2dShape&, const Tensor4dRef&,
                  const Tensor4dRef&, const Tensor4dRef&, void*, const void*, int) {
  throw std::runtime_error("cudnn: " + cudnn_missing());
}

}  // namespace braze::vendor

#endif
