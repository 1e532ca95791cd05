#include "pointwise.h"

#include <climits>

#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/matmul/hopper/hopper.h"
#include "cuda/matmul/hopper/plan.cuh"
#include "folded.h"
#include "norm_grad.cuh"
#include "strided.cuh"

namespace braze::cuda::pointwise {
namespace {

// A plan's variant: any product, or always hopper/hopper.h's stream_k, or folded.h.
enum Variant { kAnyProduct, kStreamK, kFolded };

// Images as matrices of pixels by channels.
struct Images {
  const void* data;
  int64_t count, pixels, channels;
  int64_t image, pixel, channel;  // strides
  bool even;                      // the pixels of an image are one stride apart

  // The next image's pixels go on where those of the last one end.
  bool follow() const { return count == 1 || image == pixels * pixel; }
  bool channels_last() const { return channel == 1 && pixel == channels && follow(); }
  bool contiguous() const {
    return pixel == 1 && channel == pixels && (count == 1 || image == pixels * channels);
  }
};

Images images_of(const Tensor4dRef& t, const Conv2dShape& s, int64_t channels, int64_t h,
                 int64_t w) {
  if (h * w == 1) return {t.data, 1, s.n, channels, 0, t.n, t.c, true};
  // The stride of columns says nothing where there is one.
  const int64_t pixel = w > 1 ? t.w : t.h;
  return {t.data, s.n, h * w, channels, t.n, pixel, t.c, h == 1 || w == 1 || t.h == w * t.w};
}
const Tensor4dRef& input_ref(const Conv2dArgs& args) {
  return args.pass == Conv2dPass::kDgrad ? args.out : args.gathered;
}
Images input_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  return images_of(input_ref(args), s, s.c, s.h, s.w);
}
Images output_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef& y = args.pass == Conv2dPass::kFprop   ? args.out
                         : args.pass == Conv2dPass::kDgrad ? args.gathered
                                                           : args.other;
  return images_of(y, s, s.k, s.p, s.q);
}

// The pass as a product. Channels-last pixels are rows of the result: those of all images, if they
// follow each other, else image by image. Contiguous pixels are its columns, image by image.
MatmulArgs product_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const Images x = input_of(args), y = output_of(args);
  MatmulArgs p{};
  p.dtype = s.dtype;
  p.batch = 1;
  p.c = const_cast<void*>(args.out.data);
  p.allow_tf32 = s.allow_tf32, p.deterministic = s.deterministic;
  if (args.pass == Conv2dPass::kWgrad) {
    p.m = s.k, p.n = s.c, p.k = x.count * x.pixels;
    p.a = {y.data, 0, y.channel, y.pixel};
    p.b = {x.data, 0, x.pixel, x.channel};
    return p;
  }
  const bool fprop = args.pass == Conv2dPass::kFprop;
  const Images &from = fprop ? x : y, &to = fprop ? y : x;
  const int64_t w_from = fprop ? args.other.c : args.other.n;
  const int64_t w_to = fprop ? args.other.n : args.other.c;
  p.k = from.channels;
  if (to.channels_last()) {
    const bool merged = from.follow();
    p.batch = merged ? 1 : from.count;
    p.m = merged ? from.count * from.pixels : from.pixels;
    p.n = to.channels;
    p.a = {from.data, merged ? 0 : from.image, from.pixel, from.channel};
    p.b = {args.other.data, 0, w_from, w_to};
    p.bias = args.bias;
  } else {
    p.batch = from.count, p.m = to.channels, p.n = to.pixels;
    p.a = {args.other.data, 0, w_to, w_from};
    p.b = {from.data, from.image, from.channel, from.pixel};
  }
  return p;
}

// The weight gradient of contiguous images.
bool is_folded(const Conv2dArgs& args) {
  return args.pass == Conv2dPass::kWgrad && !(input_of(args).follow() && output_of(args).follow());
}
FoldedProduct folded_of(const Conv2dArgs& args) {
  const Images x = input_of(args), y = output_of(args);
  return {args.shape.dtype, x.count, x.pixels, y.channels, x.channels,
          y.data,           x.data,  y.image,  x.image,    const_cast<void*>(args.out.data)};
}

bool has_stride(const Conv2dShape& s) { return s.stride_h > 1 || s.stride_w > 1; }

bool is_input_channels_last(const Conv2dArgs& args) {
  return input_ref(args).c == 1 || args.shape.c == 1;
}

// The pass of stride 1 over those pixels of the input that count, side by side at `small`, in the
// input's format.
Conv2dArgs at_stride_1(const Conv2dArgs& args, void* small) {
  if (!has_stride(args.shape)) return args;
  Conv2dArgs result = args;
  Conv2dShape& s = result.shape;
  s.h = s.p, s.w = s.q, s.stride_h = s.stride_w = 1;
  const int64_t pixels = s.h * s.w;
  const bool last = is_input_channels_last(args);
  const Tensor4dRef x = last ? Tensor4dRef{small, pixels * s.c, 1, s.w * s.c, s.c}
                             : Tensor4dRef{small, pixels * s.c, pixels, s.w, 1};
  (args.pass == Conv2dPass::kDgrad ? result.out : result.gathered) = x;
  return result;
}

int64_t small_bytes(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  return has_stride(s) ? hopper::aligned(s.n * s.p * s.q * s.c * size_of(s.dtype)) : 0;
}

// The input's grid and that of the pixels at `small`, in units of so many bytes.
int bytes_of_units(const Conv2dArgs& args, const void* small) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef& x = input_ref(args);
  const int64_t size = size_of(s.dtype);
  return is_input_channels_last(args) ? unit_bytes(size, s.c, {x.n, x.h, x.w}, x.data, small)
                                      : static_cast<int>(size);
}
Grids grids_of(const Conv2dArgs& args, int bytes) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef& x = input_ref(args);
  const bool last = is_input_channels_last(args);
  const int64_t each = bytes / size_of(s.dtype);  // elements
  Grids g{};
  g.small_rows = FastDiv(s.p), g.small_columns = FastDiv(s.q);
  g.large_rows = FastDiv(s.h), g.large_columns = FastDiv(s.w);
  g.units = FastDiv(last ? s.c / each : 1);
  g.stride_h = FastDiv(s.stride_h), g.stride_w = FastDiv(s.stride_w);
  g.plane = (last ? x.n : x.c) / each, g.row = x.h / each, g.column = x.w / each;
  g.planes = last ? s.n : s.n * s.c;
  return g;
}

// Between the input and `small`: that way, or back with zeros between.
void move_pixels(Stream stream, const Conv2dArgs& args, void* small, bool spread) {
  const Tensor4dRef& x = input_ref(args);
  const int bytes = bytes_of_units(args, small);
  const Grids g = grids_of(args, bytes);
  switch (bytes) {
    case 2: return launch_pixels<uint16_t>(stream, g, x.data, small, spread);
    case 4: return launch_pixels<uint32_t>(stream, g, x.data, small, spread);
    case 8: return launch_pixels<uint2>(stream, g, x.data, small, spread);
    default: return launch_pixels<uint4>(stream, g, x.data, small, spread);
  }
}

// Of an input that has a stride.
const char* stride_obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef& x = input_ref(args);
  if (s.h * s.w * s.c > INT_MAX) return "it counts an image's elements with 31 bits";
  return is_input_channels_last(args) || x.n == s.c * x.c || s.n == 1
             ? nullptr
             : "of a stride its images are channels last, or one stride apart";
}

// Long sums of small results: the rules of matmul's own choice among kernels are measured on
// products of other proportions.
bool is_for_stream_k(const MatmulArgs& p) {
  if (hopper::stream_k_obstacle(p)) return false;
  return hopper::make_plan(p, true).cost <= hopper::make_plan(p).cost;
}

// y[i] += bias of the plane that element i is in, perhaps through a ReLU: of contiguous tensors,
// whose rows are filters, where the product adds by columns.
template <typename T>
__global__ void add_bias_kernel(T* y, const T* bias, bool relu, int64_t count, int64_t pixels,
                                int64_t filters) {
  wait_for_earlier_kernels();
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    using A = acc_t<T>;
    const A v = convert<A>(y[i]) + convert<A>(bias[i / pixels % filters]);
    y[i] = convert<T>(relu && v < A(0) ? A(0) : v);  // NaN stays NaN
  }
}

void add_bias(Stream stream, const Conv2dArgs& args) {
  constexpr int kThreads = 256;
  const Images y = output_of(args);
  const int64_t count = y.count * y.channels * y.pixels;
  dispatch(args.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_early(add_bias_kernel<T>, grid_stride_blocks(count, kThreads), kThreads, 0, stream,
                 static_cast<T*>(const_cast<void*>(y.data)), static_cast<const T*>(args.bias),
                 args.relu, count, y.pixels, y.channels);
    check_launch("conv2d pointwise bias");
  });
}

}  // namespace

const char* obstacle(const Conv2dArgs& given) {
  const Conv2dShape& s = given.shape;
  if (s.r != 1 || s.s != 1 || s.pad_h != 0 || s.pad_w != 0 || s.groups != 1) {
    return "it takes 1 x 1 filters, no padding, one group";
  }
  if (has_stride(s)) {
    if (const char* why = stride_obstacle(given)) return why;
  }
  const Conv2dArgs args = at_stride_1(given, nullptr);
  const Images x = input_of(args), y = output_of(args);
  if (!x.even || !y.even) return "the pixels of its images are one stride apart";
  if (is_folded(args)) {
    if (!(x.pixel == 1 && x.channel == x.pixels && y.pixel == 1 && y.channel == y.pixels)) {
      return "its weight gradient takes dense images";
    }
    return folded_obstacle(folded_of(args), s.allow_tf32);
  }
  const Images& to = args.pass == Conv2dPass::kFprop ? y : x;
  const bool dense = args.pass == Conv2dPass::kWgrad || to.channels_last() || to.contiguous();
  return dense ? nullptr : "its result is dense";
}

void plan(const Conv2dArgs& given, Conv2dPlan* plan) {
  const Conv2dArgs args = at_stride_1(given, nullptr);
  if (is_folded(args)) {
    plan->variant = kFolded;
    plan->workspace_bytes = folded_workspace_bytes(folded_of(args)) + small_bytes(given);
    return;
  }
  const MatmulArgs p = product_of(args);
  if (args.pass == Conv2dPass::kWgrad && is_for_stream_k(p)) {
    plan->variant = kStreamK;
    hopper::plan_stream_k(p, &plan->product);
  } else {
    plan->product = plan_matmul(p, kAnyKernel);
  }
  plan->workspace_bytes = plan->product.workspace_bytes + small_bytes(given);
}

void run(Stream stream, const Conv2dArgs& given, const Conv2dPlan& plan, void* workspace) {
  const Conv2dArgs args = at_stride_1(given, workspace);
  const bool strided = has_stride(given.shape), dgrad = given.pass == Conv2dPass::kDgrad;
  void* const rest = static_cast<char*>(workspace) + small_bytes(given);
  if (strided && !dgrad) move_pixels(stream, given, workspace, false);
  if (plan.variant == kFolded) return run_folded(stream, folded_of(args), rest);
  MatmulArgs p = product_of(args);
  const bool bias_is_left = args.bias && !p.bias;
  p.relu = args.relu && !bias_is_left;
  if (plan.variant == kStreamK) return hopper::run(stream, p, plan.product, rest);
  run_matmul(stream, p, plan.product, rest);
  if (bias_is_left) add_bias(stream, args);
  if (strided && dgrad) move_pixels(stream, given, workspace, true);
}

bool plan_added(const Conv2dArgs& args, Conv2dPlan* plan) {
  if (!input_of(args).channels_last()) return false;
  if (has_stride(args.shape)) {  // by the pass that spreads the product's pixels
    return args.shape.dtype != DType::kFloat64 && bytes_of_units(args, nullptr) == 16;
  }
  MatmulArgs p = product_of(args);
  p.residual = p.c;                                       // any: whether there is one decides
  if (p.batch != 1 || hopper::obstacle(p)) return false;  // others have not been timed
  plan->product = plan_matmul(p, kAnyKernel);
  plan->workspace_bytes = plan->product.workspace_bytes;
  return true;
}

void run_added(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, const void* added,
               void* workspace) {
  if (has_stride(args.shape)) {
    run_matmul(stream, product_of(at_stride_1(args, workspace)), plan.product,
               static_cast<char*>(workspace) + small_bytes(args));
    return dispatch(args.shape.dtype, [&](auto tag) {
      launch_added_pixels<typename decltype(tag)::type>(stream, grids_of(args, 16), args.out.data,
                                                        added, workspace);
    });
  }
  MatmulArgs p = product_of(args);
  p.residual = added;
  run_matmul(stream, p, plan.product, workspace);
}

bool plan_norm_grad(const Conv2dArgs& args, Conv2dPlan* plan) {
  const Conv2dShape& s = args.shape;
  const int64_t rows = s.n * s.h * s.w, width = 16 / size_of(s.dtype);
  if (args.pass != Conv2dPass::kDgrad || !has_stride(s) || s.dtype == DType::kFloat64 ||
      !input_of(args).channels_last() || bytes_of_units(args, nullptr) != 16 || rows > INT_MAX) {
    return false;
  }
  plan->moment_sets = plan_row_sums(rows, s.c / width).parts;
  return true;
}

void run_norm_grad(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan,
                   const Conv2dNormGrad& norm, void* workspace) {
  const Conv2dShape& s = args.shape;
  run_matmul(stream, product_of(at_stride_1(args, workspace)), plan.product,
             static_cast<char*>(workspace) + small_bytes(args));
  dispatch(s.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      constexpr int kWidth = kVecWidth<T>;
      const RowPlan rows = plan_row_sums(s.n * s.h * s.w, s.c / kWidth);
      const NormGradArgs<T> with{static_cast<const T*>(workspace),
                                 static_cast<const T*>(norm.added),
                                 static_cast<const T*>(norm.before),
                                 norm.mask,
                                 static_cast<T*>(const_cast<void*>(args.out.data)),
                                 norm.statistics,
                                 static_cast<float>(norm.activation.first),
                                 static_cast<float>(norm.activation.second)};
      launch_early(add_pixels_norm_kernel<T, kWidth>, rows.grid(), rows.threads, 0, stream,
                   grids_of(args, 16), with, rows,
                   reinterpret_cast<GradPartial<float>*>(norm.sums));
      check_launch("conv2d pointwise stride, norm");
    }
  });
}

}  // namespace braze::cuda::pointwise
