// cuDNN's graph API as a conv2d kernel, through NVIDIA's header-only cudnn-frontend: one graph of a
// single convolution (and the addition of a bias) per shape, layout and setting.
#include "vendor/vendor.h"

#if defined(BRAZE_WITH_CUDNN) && defined(BRAZE_WITH_CUDNN_FRONTEND)

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "vendor/loader.h"

namespace fe = cudnn_frontend;

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // where cudnn-frontend looks its symbols up
}

namespace braze::vendor {
namespace {

using cuda::Conv2dPass;
using Dims = std::vector<int64_t>;

constexpr int kMaxDevices = 64;
// Plans that want more are passed over; what a large layer needs to convert its layout fits.
constexpr int64_t kMaxWorkspace = int64_t{2} << 30;

enum Uid : int64_t { kX = 1, kW, kY, kBias };

std::string load() {
  std::string missing;
  fe::cudnn_dlhandle = open_library("libcudnn.so." + std::to_string(CUDNN_MAJOR), &missing);
  return missing;
}

void check(fe::error_t error) {
  if (error.is_bad()) throw std::runtime_error("cudnn: " + error.get_message());
}

fe::DataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return fe::DataType_t::DOUBLE;
    case DType::kFloat32: return fe::DataType_t::FLOAT;
    case DType::kBFloat16: return fe::DataType_t::BFLOAT16;
    case DType::kFloat16: return fe::DataType_t::HALF;
  }
  return fe::DataType_t::NOT_SET;  // not reached
}

// A 4-D tensor in cuDNN's order N C H W, whatever the order in memory.
struct TensorDesc {
  Dims dims, strides;

  TensorDesc(Dims extents, const Tensor4dRef& t)
      : dims(std::move(extents)), strides{t.n, t.c, t.h, t.w} {}

  int64_t numel() const { return dims[0] * dims[1] * dims[2] * dims[3]; }

  // In NHWC order in memory, and not in NCHW order at the same time.
  bool is_nhwc() const { return dims[1] > 1 && strides[1] == 1 && dims[2] * dims[3] > 1; }

  // The stride of a dimension of size 1 is never used, yet engines look at it to tell layouts
  // apart.
  void fix_unused_strides(bool nhwc) {
    int64_t expected = 1;
    for (const int d : nhwc ? std::array{1, 3, 2, 0} : std::array{3, 2, 1, 0}) {
      if (dims[d] == 1) strides[d] = expected;
      expected = dims[d] * strides[d];
    }
  }

  bool is_dense() const {
    int64_t last = 0;
    for (int d = 0; d < 4; ++d) last += (dims[d] - 1) * strides[d];
    return last == numel() - 1;
  }
};

// The padding below (right of) the last row that makes the output extent come out.
std::optional<int64_t> post_padding(int64_t in, int64_t out, int64_t filter, int64_t stride,
                                    int64_t dilation, int64_t pre) {
  const int64_t window = (filter - 1) * dilation + 1;
  const auto gives_out = [&](int64_t post) {
    const int64_t room = in + pre + post - window;
    return room >= 0 && room / stride + 1 == out;
  };
  // Symmetric padding wherever it does: more engines take it.
  if (gives_out(pre)) return pre;
  const int64_t post = std::max<int64_t>((out - 1) * stride + window - in - pre, 0);
  return gives_out(post) ? std::optional(post) : std::nullopt;
}

// All that a plan depends on, besides the device.
struct Problem {
  Conv2dPass pass;
  Conv2dShape shape;
  TensorDesc x, w, y;
  bool has_bias;
  int64_t post_h = 0, post_w = 0;
  bool possible = true;

  Problem(Conv2dPass pass, const Conv2dShape& s, const Tensor4dRef& x_ref, const Tensor4dRef& w_ref,
          const Tensor4dRef& y_ref, bool has_bias)
      : pass(pass),
        shape(s),
        x({s.n, s.c, s.h, s.w}, x_ref),
        w({s.k, s.c / s.groups, s.r, s.s}, w_ref),
        y({s.n, s.k, s.p, s.q}, y_ref),
        has_bias(has_bias) {
    const bool nhwc = x.is_nhwc() || w.is_nhwc() || y.is_nhwc();
    for (TensorDesc* t : {&x, &w, &y}) t->fix_unused_strides(nhwc);
    if (is_empty()) return;
    const auto h = post_padding(s.h, s.p, s.r, s.stride_h, s.dilation_h, s.pad_h);
    const auto w = post_padding(s.w, s.q, s.s, s.stride_w, s.dilation_w, s.pad_w);
    possible = h && w && !(has_bias && pass != Conv2dPass::kFprop);
    post_h = h.value_or(0);
    post_w = w.value_or(0);
  }

  bool is_empty() const { return x.numel() == 0 || w.numel() == 0 || y.numel() == 0; }
  const TensorDesc& result() const {
    return pass == Conv2dPass::kFprop ? y : pass == Conv2dPass::kDgrad ? x : w;
  }

  using Key = std::array<int64_t, 37>;
  Key key() const {
    const Conv2dShape& s = shape;
    Key key = {static_cast<int64_t>(pass),
               static_cast<int64_t>(s.dtype),
               has_bias,
               s.allow_tf32,
               s.deterministic,
               s.stride_h,
               s.stride_w,
               s.pad_h,
               s.pad_w,
               s.dilation_h,
               s.dilation_w,
               post_h,
               post_w};
    size_t at = 13;
    for (const TensorDesc* t : {&x, &w, &y}) {
      for (const int64_t v : t->dims) key[at++] = v;
      for (const int64_t v : t->strides) key[at++] = v;
    }
    return key;
  }
};

// A graph and those of its engine configurations that were tried so far.
class Plans {
 public:
  Plans(const Problem& p, cudnnHandle_t handle) {
    const AllowSetupInCapture allow;
    const fe::DataType_t type = data_type(p.shape.dtype);
    const fe::DataType_t compute =
        p.shape.dtype == DType::kFloat64 ? fe::DataType_t::DOUBLE : fe::DataType_t::FLOAT;
    graph_.set_io_data_type(type).set_intermediate_data_type(compute).set_compute_data_type(
        compute);
    add_nodes(p);
    // A graph that no engine takes is no error: there are no candidates then.
    if (graph_.validate().is_bad() || graph_.build_operation_graph(handle).is_bad() ||
        graph_.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}).is_bad()) {
      return;
    }
    std::vector<fe::NumericalNote_t> refused = {fe::NumericalNote_t::DOWN_CONVERT_INPUTS,
                                                fe::NumericalNote_t::REDUCED_PRECISION_REDUCTION};
    // fp32 on tensor cores is TF32.
    if (p.shape.dtype == DType::kFloat32 && !p.shape.allow_tf32) {
      refused.push_back(fe::NumericalNote_t::TENSOR_CORE);
    }
    if (p.shape.deterministic) refused.push_back(fe::NumericalNote_t::NONDETERMINISTIC);
    graph_.deselect_numeric_notes(refused);
    graph_.deselect_workspace_greater_than(kMaxWorkspace);
    count_ = graph_.get_execution_plan_count();
  }

  // Builds configurations, best first, until there are enough that work.
  bool has(int candidate, cudnnHandle_t handle) {
    if (candidate < 0 || candidate >= kMaxCandidates) return false;
    if (static_cast<size_t>(candidate) < built_.size()) return true;
    const AllowSetupInCapture allow;
    while (static_cast<size_t>(candidate) >= built_.size() && next_ < count_) {
      const int64_t index = next_++;
      if (graph_.build_plan_at_index(handle, index).is_good()) built_.push_back(index);
    }
    return static_cast<size_t>(candidate) < built_.size();
  }

  int64_t workspace_bytes(int candidate) const {
    return graph_.get_workspace_size_plan_at_index(built_[candidate]);
  }

  void run(cudnnHandle_t handle, const Problem& p, const void* x, const void* w, const void* y,
           const void* bias, void* workspace, int candidate) {
    std::unordered_map<int64_t, void*> pointers = {
        {kX, const_cast<void*>(x)}, {kW, const_cast<void*>(w)}, {kY, const_cast<void*>(y)}};
    if (p.has_bias) pointers.emplace(kBias, const_cast<void*>(bias));
    check(graph_.execute_plan_at_index(handle, pointers, workspace, built_[candidate]));
  }

 private:
  using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

  TensorPtr input(Uid uid, const TensorDesc& t) {
    return graph_.tensor(
        fe::graph::Tensor_attributes().set_uid(uid).set_dim(t.dims).set_stride(t.strides));
  }

  static void set_result(const TensorPtr& tensor, Uid uid, const TensorDesc& t,
                         fe::DataType_t type) {
    tensor->set_output(true).set_uid(uid).set_dim(t.dims).set_stride(t.strides).set_data_type(type);
  }

  template <typename Attributes>
  static Attributes conv(const Problem& p) {
    const Conv2dShape& s = p.shape;
    return Attributes()
        .set_pre_padding({s.pad_h, s.pad_w})
        .set_post_padding({p.post_h, p.post_w})
        .set_stride({s.stride_h, s.stride_w})
        .set_dilation({s.dilation_h, s.dilation_w});
  }

  void add_nodes(const Problem& p) {
    const fe::DataType_t type = data_type(p.shape.dtype);
    switch (p.pass) {
      case Conv2dPass::kFprop: {
        TensorPtr y = graph_.conv_fprop(input(kX, p.x), input(kW, p.w),
                                        conv<fe::graph::Conv_fprop_attributes>(p));
        if (p.has_bias) {
          y->set_dim(p.y.dims).set_stride(p.y.strides);
          const TensorPtr bias = graph_.tensor(fe::graph::Tensor_attributes()
                                                   .set_uid(kBias)
                                                   .set_dim({1, p.shape.k, 1, 1})
                                                   .set_stride({p.shape.k, 1, 1, 1}));
          y = graph_.pointwise(
              y, bias, fe::graph::Pointwise_attributes().set_mode(fe::PointwiseMode_t::ADD));
        }
        return set_result(y, kY, p.y, type);
      }
      case Conv2dPass::kDgrad:
        return set_result(graph_.conv_dgrad(input(kY, p.y), input(kW, p.w),
                                            conv<fe::graph::Conv_dgrad_attributes>(p)),
                          kX, p.x, type);
      case Conv2dPass::kWgrad:
        return set_result(graph_.conv_wgrad(input(kY, p.y), input(kX, p.x),
                                            conv<fe::graph::Conv_wgrad_attributes>(p)),
                          kW, p.w, type);
    }
  }

  fe::graph::Graph graph_;
  std::vector<int64_t> built_;  // plan indices, best first
  int64_t next_ = 0, count_ = 0;
};

// One handle and one cache per device. Neither a handle nor, with every engine, a plan may be used
// by two threads at once, so the lock is held while work is enqueued, a few microseconds.
class Device {
 public:
  template <typename F>
  static auto with_plans(const Problem& p, F&& f) {
    static Device devices[kMaxDevices];
    Device& device = devices[current_device()];
    const std::lock_guard<std::mutex> lock(device.mutex_);
    if (!device.handle_) {
      const AllowSetupInCapture allow;
      check_status(fe::detail::create_handle(&device.handle_), "create handle");
    }
    return f(device, device.plans_for(p));
  }

  cudnnHandle_t handle() const { return handle_; }

  void set_stream(cudaStream_t stream) {
    if (has_stream_ && stream == stream_) return;
    check_status(fe::detail::set_stream(handle_, stream), "set stream");
    stream_ = stream;
    has_stream_ = true;
  }

 private:
  static void check_status(cudnnStatus_t status, const char* what) {
    if (status != CUDNN_STATUS_SUCCESS) {
      throw std::runtime_error(std::string("cudnn: ") + what + ": " +
                               fe::detail::get_error_string(status));
    }
  }

  Plans& plans_for(const Problem& p) {
    const Problem::Key key = p.key();
    const auto found = cache_.find(key);
    if (found != cache_.end()) return *found->second;
    if (cache_.size() >= kMaxCachedProblems) cache_.clear();
    return *cache_.emplace(key, std::make_unique<Plans>(p, handle_)).first->second;
  }

  std::mutex mutex_;
  cudnnHandle_t handle_ = nullptr;
  cudaStream_t stream_ = nullptr;
  bool has_stream_ = false;
  std::unordered_map<Problem::Key, std::unique_ptr<Plans>, HashWords> cache_;
};

}  // namespace

const std::string& cudnn_missing() {
  static const std::string missing = load();
  return missing;
}

std::string cudnn_version() {
  return cudnn_missing().empty() ? dotted_version(fe::detail::get_backend_version()) : "";
}

bool cudnn_supports(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                    const Tensor4dRef& w, const Tensor4dRef& y, const void* bias, int candidate) {
  if (!cudnn_missing().empty()) return false;
  const Problem p(pass, shape, x, w, y, bias != nullptr);
  // Sums over nothing are zeros: written without cuDNN.
  if (p.is_empty()) return p.result().numel() == 0 || (p.result().is_dense() && !bias);
  return p.possible && Device::with_plans(p, [&](Device& device, Plans& plans) {
           return plans.has(candidate, device.handle());
         });
}

int cudnn_candidates(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                     const Tensor4dRef& w, const Tensor4dRef& y, const void* bias) {
  int count = 0;
  while (count < kMaxCandidates && cudnn_supports(pass, shape, x, w, y, bias, count)) ++count;
  return count;
}

int64_t cudnn_workspace_bytes(Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                              const Tensor4dRef& w, const Tensor4dRef& y, const void* bias,
                              int candidate) {
  if (!cudnn_missing().empty()) return 0;
  const Problem p(pass, shape, x, w, y, bias != nullptr);
  if (p.is_empty() || !p.possible) return 0;
  return Device::with_plans(p, [&](Device& device, Plans& plans) {
    return plans.has(candidate, device.handle()) ? plans.workspace_bytes(candidate) : 0;
  });
}

void cudnn_conv2d(Stream stream, Conv2dPass pass, const Conv2dShape& shape, const Tensor4dRef& x,
                  const Tensor4dRef& w, const Tensor4dRef& y, void* workspace, const void* bias,
                  int candidate) {
  if (!cudnn_missing().empty()) throw std::runtime_error("cudnn: " + cudnn_missing());
  const Problem p(pass, shape, x, w, y, bias != nullptr);
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
    if (!plans.has(candidate, device.handle())) throw unsupported();
    device.set_stream(cuda_stream);
    plans.run(device.handle(), p, x.data, w.data, y.data, bias, workspace, candidate);
  });
}

}  // namespace braze::vendor

#else  // built without cudnn.h or without cudnn_frontend.h

namespace braze::vendor {

const std::string& cudnn_missing() {
  static const std::string reason =
#ifdef BRAZE_WITH_CUDNN
      "braze was built without cudnn_frontend.h"
#else
      "braze was built without cudnn.h"
#endif
      ": pip install -r requirements-build-cuda12.txt (or 13), then build again";
  return reason;
}
std::string cudnn_version() { return ""; }
bool cudnn_supports(cuda::Conv2dPass, const Conv2dShape&, const Tensor4dRef&, const Tensor4dRef&,
                    const Tensor4dRef&, const void*, int) {
  return false;
}
int cudnn_candidates(cuda::Conv2dPass, const Conv2dShape&, const Tensor4dRef&, const Tensor4dRef&,
                     const Tensor4dRef&, const void*) {
  return 0;
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
