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

std::optional<int64_t> cudnn_plan(const Conv2dProblem& problem, const void* bias, int candidate) {
  if (!cudnn_missing().empty()) return std::nullopt;
  const Problem p(problem, bias);
  if (p.is_empty()) {  // sums over nothing are zeros: written without cuDNN
    const bool possible = p.result().numel() == 0 || (p.result().is_dense() && !bias);
    return possible ? std::optional<int64_t>(0) : std::nullopt;
  }
  if (!p.possible) return std::nullopt;
  return Device::with_plans(p, [&](Device&, Plans& plans) -> std::optional<int64_t> {
    if (!plans.has(candidate)) return std::nullopt;
    return align_up(plans.workspace_bytes(candidate)) + p.copy_bytes();
  });
}

void cudnn_conv2d(Stream stream, const Conv2dProblem& problem, void* workspace, const void* bias,
                  int candidate) {
  if (!cudnn_missing().empty()) throw std::runtime_error("cudnn: " + cudnn_missing());
  const Problem p(problem, bias);
  const Conv2dShape& shape = problem.shape;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto unsupported = [&] {
    return std::runtime_error("cudnn: no engine number " + std::to_string(candidate) +
                              " for this shape, layout and precision");
  };
  if (p.is_empty()) {
    if (p.result().numel() == 0) return;
    if (!p.result().is_dense() || bias) throw unsupported();
    check_cuda(cudaMemsetAsync(const_cast<void*>(problem.result().data), 0,
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
    plans.run(aligned(problem.x.data, p.x.numel()), aligned(problem.w.data, p.w.numel()),
              aligned(problem.y.data, p.y.numel()), aligned(bias, shape.k), workspace, candidate);
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
std::optional<int64_t> cudnn_plan(const Conv2dProblem&, const void*, int) { return std::nullopt; }
void cudnn_conv2d(Stream, const Conv2dProblem&, void*, const void*, int) {
  throw std::runtime_error("cudnn: " + cudnn_missing());
}

}  // namespace braze::vendor

#endif
