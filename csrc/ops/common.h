// What every op needs between torch and a launcher: argument checks, device guard and stream,
// allocation. Files in csrc/ops are compiled twice, with BRAZE_DEVICE=cpu and =cuda, against the
// launchers of that device.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "launchers/common/types.h"
#include "ops/huge_pages.h"
#include "ops/text.h"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream);

#ifdef BRAZE_CUDA
#define BRAZE_LIBRARY_IMPL(ops, library) STABLE_TORCH_LIBRARY_IMPL(ops, CUDA, library)
#else
#define BRAZE_LIBRARY_IMPL(ops, library) STABLE_TORCH_LIBRARY_IMPL(ops, CPU, library)
#endif

// BRAZE_IMPL(m) { m.impl("relu", TORCH_BOX(&relu)); } registers for the device being compiled, for
// both namespaces that bindings/library.cpp defines.
#define BRAZE_IMPL(m) BRAZE_NAMED_IMPL(m, C10_UID)
#define BRAZE_NAMED_IMPL(m, uid)                                            \
  static void C10_CONCATENATE(braze_impl_, uid)(::braze::Implementations&); \
  BRAZE_LIBRARY_IMPL(braze, library) {                                      \
    ::braze::Implementations implementations(library);                      \
    C10_CONCATENATE(braze_impl_, uid)(implementations);                     \
  }                                                                         \
  BRAZE_LIBRARY_IMPL(braze_kernels, library) {                              \
    ::braze::Implementations implementations(library);                      \
    C10_CONCATENATE(braze_impl_, uid)(implementations);                     \
  }                                                                         \
  static void C10_CONCATENATE(braze_impl_, uid)(::braze::Implementations & m)

// Throws RuntimeError in Python, the message being the concatenation of all further arguments.
#define BRAZE_CHECK(condition, ...)                                  \
  do {                                                               \
    if (!(condition)) throw std::runtime_error(concat(__VA_ARGS__)); \
  } while (false)

namespace braze {

// A front end as the dispatcher calls it: arguments on a stack, which results replace.
using FrontEnd = void (*)(StableIValue* stack, uint64_t arguments, uint64_t results);

// Those of the device being compiled, by the names of their ops.
inline std::unordered_map<std::string, FrontEnd>& front_ends() {
  static std::unordered_map<std::string, FrontEnd> all;
  return all;
}

class Implementations {
 public:
  explicit Implementations(torch::stable::detail::StableLibrary& library) : library_(library) {}
  void impl(const char* op, FrontEnd front_end) {
    library_.impl(op, front_end);
    front_ends()[op] = front_end;
  }

 private:
  torch::stable::detail::StableLibrary& library_;
};

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// The launchers of the device being compiled.
namespace dev = BRAZE_DEVICE;

// Makes the tensor's device current for the scope and yields torch's current stream on it.
class DeviceContext {
 public:
#ifdef BRAZE_CUDA
  explicit DeviceContext(const Tensor& t) : guard_(t.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream_));
  }
  Stream stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
#else
  explicit DeviceContext(const Tensor&) {}
  Stream stream() const { return nullptr; }
#endif
};

inline const char* scalar_type_name(ScalarType t) {
  switch (t) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return "an unsupported dtype";
  }
}

// The tensor's dtype, one of the four floating-point types that every op takes.
inline DType dtype_of(const char* op, const char* arg, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    default:
      BRAZE_CHECK(false, op, ": expected ", arg,
                  " of dtype float64, float32, bfloat16 or float16, but got ",
                  scalar_type_name(t.scalar_type()));
  }
  return DType::kFloat32;  // not reached
}

inline std::string shape_string(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes(t.dim());
  for (int64_t i = 0; i < t.dim(); ++i) sizes[i] = t.size(i);
  return sizes;
}

inline std::string device_string(const Tensor& t) {
  return t.is_cuda()  ? "cuda:" + std::to_string(t.get_device_index())
         : t.is_cpu() ? "cpu"
                      : "other";
}

inline void check_same_device(const char* op, const char* arg, const Tensor& t, const char* ref_arg,
                              const Tensor& ref) {
  BRAZE_CHECK(t.is_cuda() == ref.is_cuda() && t.get_device_index() == ref.get_device_index(), op,
              ": expected all tensors to be on the same device, but ", arg, " is on ",
              device_string(t), " and ", ref_arg, " is on ", device_string(ref));
}

inline void check_same_dtype(const char* op, const char* arg, const Tensor& t, const char* ref_arg,
                             const Tensor& ref) {
  BRAZE_CHECK(t.scalar_type() == ref.scalar_type(), op, ": expected ", arg,
              " to have the same dtype as ", ref_arg, ", but got ",
              scalar_type_name(t.scalar_type()), " and ", scalar_type_name(ref.scalar_type()));
}

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != b.size(i)) return false;
  }
  return true;
}
inline bool same_sizes(const Tensor& t, const std::vector<int64_t>& sizes) {
  if (t.dim() != static_cast<int64_t>(sizes.size())) return false;
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) != sizes[i]) return false;
  }
  return true;
}

inline void check_same_shape(const char* op, const char* arg, const Tensor& t, const char* ref_arg,
                             const Tensor& ref) {
  BRAZE_CHECK(same_sizes(t, ref), op, ": expected ", arg, " to have the same shape as ", ref_arg,
              ", but got ", shape_string(t), " and ", shape_string(ref));
}

// An uninitialised tensor on the device of `like`, in its dtype unless given. torch::stable's own
// functions look an op up by its name and box the arguments, which costs more than the allocation.
inline Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dim,
                            const Tensor& like, std::optional<ScalarType> dtype = std::nullopt) {
  int32_t device_type, device_index, dtype_number;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  if (dtype) {
    using torch::stable::detail::from;
    dtype_number = torch::stable::detail::to<int32_t>(from(*dtype));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype_number));
  }
  AtenTensorHandle result;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, dtype_number, device_type,
                                                  device_index, &result));
  const Tensor tensor(result);
#ifndef BRAZE_CUDA
  int64_t bytes;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(result, &bytes));
  if (bytes >= kHugePageBytes) prefer_huge_pages(tensor.mutable_data_ptr(), bytes);
#endif
  return tensor;
}

// Of a dense tensor, the dimensions in memory in the order `inner_to_outer`.
inline std::vector<int64_t> dense_strides(const std::vector<int64_t>& sizes,
                                          const int* inner_to_outer) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t d = inner_to_outer ? inner_to_outer[i] : sizes.size() - 1 - i;
    strides[d] = stride;
    // As torch has it: an empty dimension counts as 1 in contiguous strides, as 0 in channels_last.
    stride *= inner_to_outer ? sizes[d] : std::max<int64_t>(1, sizes[d]);
  }
  return strides;
}

inline Tensor empty_dense(const std::vector<int64_t>& sizes, const int* inner_to_outer,
                          const Tensor& like, std::optional<ScalarType> dtype) {
  const std::vector<int64_t> strides = dense_strides(sizes, inner_to_outer);
  return empty_strided(sizes.data(), strides.data(), sizes.size(), like, dtype);
}

inline Tensor empty(const std::vector<int64_t>& sizes, const Tensor& like,
                    std::optional<ScalarType> dtype = std::nullopt) {
  return empty_dense(sizes, nullptr, like, dtype);
}

inline Tensor zeros(const std::vector<int64_t>& sizes, const Tensor& like,
                    std::optional<ScalarType> dtype = std::nullopt) {
  Tensor result = empty(sizes, like, dtype);
  TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(result.get()));
  return result;
}

// Same sizes and the same strides wherever they matter (a dimension of size 1 may have any).
inline bool same_layout(const Tensor& a, const Tensor& b) {
  if (!same_sizes(a, b)) return false;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) > 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

// Every element at its own place in one gapless block of memory, in whatever order.
inline bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  std::vector<int64_t> dims(t.dim());
  std::iota(dims.begin(), dims.end(), 0);
  std::sort(dims.begin(), dims.end(),
            [&](int64_t a, int64_t b) { return t.stride(a) < t.stride(b); });
  int64_t expected = 1;
  for (const int64_t d : dims) {
    if (t.size(d) == 1) continue;
    if (t.stride(d) != expected) return false;
    expected *= t.size(d);
  }
  return true;
}

// Batch, channel, height and width of a 4-D tensor in NHWC order in memory, whatever the strides of
// extents of 1.
inline bool is_nhwc(const Tensor& t) {
  if (t.dim() != 4) return false;
  int64_t expected = 1;
  for (const int64_t d : {1, 3, 2, 0}) {
    if (t.size(d) != 1 && t.stride(d) != expected) return false;
    expected *= t.size(d);
  }
  return true;
}

// Where one channel or one pixel makes a tensor both contiguous and channels_last, the strides of
// the extents of 1 decide, as in torch: they are what torch.empty(..., memory_format=...) writes.
inline bool is_channels_last(const Tensor& t) {
  if (!is_nhwc(t)) return false;
  if (!t.is_contiguous()) return true;
  return t.stride(1) == 1 && t.stride(3) == t.size(1) && t.stride(0) > 1;
}

// torch.empty_like: dense in the order of `t`'s strides.
inline Tensor dense_like(const Tensor& t) {
  if (!t.is_contiguous() && !is_channels_last(t)) return torch::stable::empty_like(t);
  return empty_strided(t.sizes().data(), t.strides().data(), t.dim(), t);
}

// `t` laid out as the dense tensor `like` (same shape): itself if it already is, else a copy.
inline Tensor with_layout_of(const Tensor& t, const Tensor& like) {
  if (same_layout(t, like)) return t;
  Tensor copy = dense_like(like);
  torch::stable::copy_(copy, t);
  return copy;
}

inline Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// In one of the two formats that kernels over images know.
inline Tensor as_image(const Tensor& t) { return is_channels_last(t) ? t : as_contiguous(t); }

// A dense 4-D tensor of the given sizes, channels_last or contiguous.
constexpr int kChannelsLast[] = {1, 3, 2, 0};
inline Tensor empty_4d(const std::vector<int64_t>& nchw, const Tensor& like, bool channels_last,
                       std::optional<ScalarType> dtype = std::nullopt) {
  return empty_dense(nchw, channels_last ? kChannelsLast : nullptr, like, dtype);
}

// `t` channels_last, of 4 dimensions then, or contiguous: itself if it is so, else a copy.
inline Tensor in_order(const Tensor& t, bool channels_last) {
  if (!channels_last) return as_contiguous(t);
  return is_channels_last(t) ? t : with_layout_of(t, empty_4d(sizes_of(t), t, true));
}

// The gradient of the 4-D `weight`, to be written in the given format. Where the weight's own
// strides mean the same memory it gets those: DistributedDataParallel compares a gradient's strides
// with its parameter's, also those of extents of 1.
inline Tensor empty_weight_gradient(const Tensor& weight, bool channels_last) {
  if (channels_last ? is_nhwc(weight) : weight.is_contiguous()) {
    return empty_strided(weight.sizes().data(), weight.strides().data(), 4, weight);
  }
  return empty_4d({weight.size(0), weight.size(1), weight.size(2), weight.size(3)}, weight,
                  channels_last);
}

}  // namespace braze
