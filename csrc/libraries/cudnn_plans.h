// A convolution as cuDNN describes it, and the execution plans that cuDNN has for it.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <vector>

#include "libraries/cudnn_api.h"
#include "libraries/libraries.h"

namespace braze::vendor {

using Dims = std::vector<int64_t>;

// Plans that want more are passed over; what a large layer needs to convert its layout fits.
constexpr int64_t kMaxWorkspace = int64_t{2} << 30;

enum Uid : int64_t { kX = 1, kW, kY, kBias, kUnbiased };

inline cudnnDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return CUDNN_DATA_DOUBLE;
    case DType::kFloat32: return CUDNN_DATA_FLOAT;
    case DType::kBFloat16: return CUDNN_DATA_BFLOAT16;
    case DType::kFloat16: return CUDNN_DATA_HALF;
  }
  return CUDNN_DATA_FLOAT;  // not reached
}

// A 4-D tensor in cuDNN's order N C H W, whatever the order in memory.
struct TensorDesc {
  const void* data;
  Dims dims, strides;

  TensorDesc(Dims extents, const Tensor4dRef& t)
      : data(t.data), dims(std::move(extents)), strides{t.n, t.c, t.h, t.w} {}

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

  // Without holes: from the first element to the last, every one belongs to the tensor.
  bool is_dense() const {
    int64_t last = 0;
    for (int d = 0; d < 4; ++d) last += (dims[d] - 1) * strides[d];
    return last == numel() - 1;
  }

  bool has_positive_strides() const {
    return std::all_of(strides.begin(), strides.end(), [](int64_t s) { return s > 0; });
  }
};

// The padding below (right of) the last row that makes the output extent come out.
inline std::optional<int64_t> post_padding(int64_t in, int64_t out, int64_t filter, int64_t stride,
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
  const void* bias;  // or nullptr
  int64_t post_h = 0, post_w = 0;
  bool possible = true;

  Problem(const Conv2dProblem& problem, const void* bias)
      : pass(problem.pass),
        shape(problem.shape),
        x({shape.n, shape.c, shape.h, shape.w}, problem.x),
        w({shape.k, shape.c / shape.groups, shape.r, shape.s}, problem.w),
        y({shape.n, shape.k, shape.p, shape.q}, problem.y),
        bias(bias) {
    const Conv2dShape& s = shape;
    const bool nhwc = x.is_nhwc() || w.is_nhwc() || y.is_nhwc();
    for (TensorDesc* t : {&x, &w, &y}) t->fix_unused_strides(nhwc);
    if (is_empty()) return;
    const auto h = post_padding(s.h, s.p, s.r, s.stride_h, s.dilation_h, s.pad_h);
    const auto w = post_padding(s.w, s.q, s.s, s.stride_w, s.dilation_w, s.pad_w);
    possible = h && w && !(bias && pass != Conv2dPass::kFprop) && is_aligned(result().data);
    for (const TensorDesc* t : {&x, &this->w, &y}) {
      possible &= t->has_positive_strides() && (is_aligned(t->data) || t->is_dense());
    }
    post_h = h.value_or(0);
    post_w = w.value_or(0);
  }

  // Engines read and write 16 bytes at a time, also where the descriptor says that they may not.
  // So inputs aligned to less (a view with an offset) are copied into the workspace.
  static bool is_aligned(const void* data) { return alignment_of(data, 16) == 16; }
  int64_t copy_bytes() const {
    int64_t bytes = 0;
    for (const TensorDesc* t : {&x, &w, &y}) {
      if (!is_aligned(t->data)) bytes += align_up(t->numel() * size_of(shape.dtype));
    }
    return bytes + (bias && !is_aligned(bias) ? align_up(shape.k * size_of(shape.dtype)) : 0);
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
               bias != nullptr,
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

// A graph and its engine configurations, of which only as many as are asked for become plans.
class Plans {
 public:
  Plans(const Problem& p, cudnnHandle_t handle) : handle_(handle) {
    const AllowSetupInCapture allow;
    try {
      add_operations(p);
      std::vector<cudnnBackendDescriptor_t> raw;
      for (const Descriptor& operation : operations_) raw.push_back(operation.raw());
      graph_.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle)
          .set_array(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.size(),
                     raw.data())
          .finalize("operation graph");
    } catch (const CudnnError&) {
      return;  // nothing that cuDNN can do: there are no candidates
    }
    for (const auto mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) add_configs(p, mode);
  }

  // Builds plans, best first, until there are enough.
  bool has(int candidate) {
    if (candidate < 0 || candidate >= kMaxCandidates) return false;
    while (static_cast<size_t>(candidate) >= plans_.size() && next_ < configs_.size()) {
      const AllowSetupInCapture allow;
      try {
        Plan plan;
        plan.descriptor.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle_)
            .set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs_[next_++])
            .finalize("execution plan");
        plan.descriptor.get(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                            &plan.workspace_bytes);
        if (plan.workspace_bytes <= kMaxWorkspace) plans_.push_back(std::move(plan));
      } catch (const CudnnError&) {
        continue;  // heuristics also list configurations that do not build on this device
      }
    }
    return static_cast<size_t>(candidate) < plans_.size();
  }

  int64_t workspace_bytes(int candidate) const { return plans_[candidate].workspace_bytes; }

  void run(const void* x, const void* w, const void* y, const void* bias, void* workspace,
           int candidate) const {
    const void* pointers[] = {x, w, y, bias};
    const int64_t uids[] = {kX, kW, kY, kBias};
    const int64_t count = bias ? 4 : 3;
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    pack.set_array(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers)
        .set_array(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, uids)
        .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace)
        .finalize("variant pack");
    check_cudnn(cudnn_api().execute(handle_, plans_[candidate].descriptor.raw(), pack.raw()),
                "execute");
  }

 private:
  struct Plan {
    Descriptor descriptor{CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR};
    int64_t workspace_bytes = 0;
  };

  const Descriptor& tensor(Uid uid, cudnnDataType_t type, const Dims& dims, const Dims& strides) {
    return parts_.emplace_back(CUDNN_BACKEND_TENSOR_DESCRIPTOR)
        .set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, static_cast<int64_t>(uid))
        .set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type)
        .set(CUDNN_ATTR_TENSOR_DIMENSIONS, dims)
        .set(CUDNN_ATTR_TENSOR_STRIDES, strides)
        .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, int64_t{16})
        .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, uid == kUnbiased)
        .finalize("tensor");
  }

  void add_operations(const Problem& p) {
    const Conv2dShape& s = p.shape;
    const cudnnDataType_t type = data_type(s.dtype);
    const bool fp64 = s.dtype == DType::kFloat64;
    // Accumulation is in fp32; whether tensor cores may round fp32 inputs, add_configs decides.
    const cudnnDataType_t compute = fp64 ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
    const Descriptor& conv =
        parts_.emplace_back(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)
            .set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, compute)
            .set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE,
                 CUDNN_CROSS_CORRELATION)
            .set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, int64_t{2})
            .set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, Dims{s.pad_h, s.pad_w})
            .set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, Dims{p.post_h, p.post_w})
            .set(CUDNN_ATTR_CONVOLUTION_DILATIONS, Dims{s.dilation_h, s.dilation_w})
            .set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, Dims{s.stride_h, s.stride_w})
            .finalize("convolution");
    const auto in_memory = [&](Uid uid, const TensorDesc& t) -> const Descriptor& {
      return tensor(uid, type, t.dims, t.strides);
    };
    const Descriptor &x = in_memory(kX, p.x), &w = in_memory(kW, p.w), &y = in_memory(kY, p.y);
    const bool biased = p.bias != nullptr;
    const Descriptor& conv_y = biased ? tensor(kUnbiased, compute, p.y.dims, p.y.strides) : y;

    const auto operation = [&](cudnnBackendDescriptorType_t kind) -> Descriptor& {
      return operations_.emplace_back(kind);
    };
    // The scaling factors have the type of the accumulation.
    const auto scale = [&](Descriptor& op, cudnnBackendAttributeName_t name, float value) {
      fp64 ? op.set(name, CUDNN_TYPE_DOUBLE, static_cast<double>(value))
           : op.set(name, CUDNN_TYPE_FLOAT, value);
    };
    switch (p.pass) {
      case Conv2dPass::kFprop: {
        Descriptor& op = operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
        op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, conv)
            .set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, x)
            .set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, w)
            .set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, conv_y);
        scale(op, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, 1);
        scale(op, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, 0);
        break;
      }
      case Conv2dPass::kDgrad: {
        Descriptor& op = operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR);
        op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, conv)
            .set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, x)
            .set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, w)
            .set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, y);
        scale(op, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA, 1);
        scale(op, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA, 0);
        break;
      }
      case Conv2dPass::kWgrad: {
        Descriptor& op = operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
        op.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, conv)
            .set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, x)
            .set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, w)
            .set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, y);
        scale(op, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, 1);
        scale(op, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA, 0);
        break;
      }
    }
    operations_.back().finalize("convolution operation");
    if (!biased) return;
    const Descriptor& bias = tensor(kBias, type, {1, s.k, 1, 1}, {s.k, 1, 1, 1});
    const Descriptor& add =
        parts_.emplace_back(CUDNN_BACKEND_POINTWISE_DESCRIPTOR)
            .set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, CUDNN_POINTWISE_ADD)
            .set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, compute)
            .finalize("pointwise");
    operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, add)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, conv_y)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, bias)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y)
        .finalize("bias operation");
  }

  // Adds the configurations that a heuristic offers and the problem's settings allow, best first.
  void add_configs(const Problem& p, cudnnBackendHeurMode_t mode) {
    try {
      Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
      heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph_)
          .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode)
          .finalize("heuristic");
      const auto results = [&](int64_t count, void* values) {
        return heuristic.get(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count,
                             values);
      };
      std::vector<Descriptor> found;
      std::vector<cudnnBackendDescriptor_t> raw;
      for (int64_t left = results(0, nullptr); left > 0; --left) {
        raw.push_back(found.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).raw());
      }
      const int64_t count = results(raw.size(), raw.data());
      for (int64_t i = 0; i < count; ++i) {
        if (allowed(p, found[i])) configs_.push_back(std::move(found[i]));
      }
    } catch (const CudnnError&) {
      return;  // this heuristic knows nothing about such a graph; the other one may
    }
  }

  static bool allowed(const Problem& p, const Descriptor& config) {
    const Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendDescriptor_t raw = engine.raw();
    config.get(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &raw);
    cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    const int64_t count = engine.get(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                     CUDNN_NUMERICAL_NOTE_TYPE_COUNT, notes);
    return std::none_of(notes, notes + count, [&](cudnnBackendNumericalNote_t note) {
      switch (note) {
        case CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS:
        case CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION: return true;
        // fp32 on tensor cores is TF32.
        case CUDNN_NUMERICAL_NOTE_TENSOR_CORE:
          return p.shape.dtype == DType::kFloat32 && !p.shape.allow_tf32;
        case CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC: return p.shape.deterministic;
        // Up to 70 times less accurate than plain sums in gradients.
        case CUDNN_NUMERICAL_NOTE_FFT:
        case CUDNN_NUMERICAL_NOTE_WINOGRAD:
        case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4:
        case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6:
        case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13: return p.pass != Conv2dPass::kFprop;
        default: return false;
      }
    });
  }

  cudnnHandle_t handle_;
  std::deque<Descriptor> parts_;  // tensors and attributes, alive as long as the operations
  std::deque<Descriptor> operations_;
  Descriptor graph_{CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR};
  std::vector<Descriptor> configs_;
  std::vector<Plan> plans_;
  size_t next_ = 0;  // the first configuration that was not tried
};

}  // namespace braze::vendor
