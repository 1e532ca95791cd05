#include "pointwise.h"

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/matmul/hopper/hopper.h"
#include "cuda/matmul/hopper/plan.cuh"

namespace braze::cuda::pointwise {
namespace {

constexpr int kStreamK = 1;  // a plan's variant: the product is hopper/hopper.h's stream_k

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
Images input_of(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef& x = args.pass == Conv2dPass::kDgrad ? args.out : args.gathered;
  return images_of(x, s, s.c, s.h, s.w);
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

// Long sums of small results: the product's own choice, whose rules are measured on products of
// other proportions, splits them less far than stream_k does.
bool is_for_stream_k(const MatmulArgs& p) {
  if (size_of(p.dtype) != 2 || hopper::stream_k_obstacle(p)) return false;
  return hopper::make_plan(p, true).cost < hopper::make_plan(p).cost;
}

// y[i] += bias of the plane that element i is in: of contiguous tensors, whose rows are filters,
// where the product adds by columns.
template <typename T>
__global__ void add_bias_kernel(T* y, const T* bias, int64_t count, int64_t pixels,
                                int64_t filters) {
  wait_for_earlier_kernels();
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    using A = acc_t<T>;
    y[i] = convert<T>(convert<A>(y[i]) + convert<A>(bias[i / pixels % filters]));
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
                 count, y.pixels, y.channels);
    check_launch("conv2d pointwise bias");
  });
}

}  // namespace

const char* obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (s.r != 1 || s.s != 1 || s.pad_h != 0 || s.pad_w != 0 || s.stride_h != 1 || s.stride_w != 1 ||
      s.groups != 1) {
    return "it takes 1 x 1 filters, stride 1, no padding, one group";
  }
  const Images x = input_of(args), y = output_of(args);
  if (!x.even || !y.even) return "the pixels of its images are one stride apart";
  if (args.pass == Conv2dPass::kWgrad) {
    return x.follow() && y.follow() ? nullptr
                                    : "its weight gradient takes channels-last tensors, or one "
                                      "image";
  }
  const Images& to = args.pass == Conv2dPass::kFprop ? y : x;
  return to.channels_last() || to.contiguous() ? nullptr : "its result is dense";
}

void plan(const Conv2dArgs& args, Conv2dPlan* plan) {
  const MatmulArgs p = product_of(args);
  if (args.pass == Conv2dPass::kWgrad && is_for_stream_k(p)) {
    plan->variant = kStreamK;
    hopper::plan_stream_k(p, &plan->product);
  } else {
    plan->product = plan_matmul(p, kAnyKernel);
  }
  plan->workspace_bytes = plan->product.workspace_bytes;
}

void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace) {
  const MatmulArgs p = product_of(args);
  if (plan.variant == kStreamK) return hopper::run(stream, p, plan.product, workspace);
  run_matmul(stream, p, plan.product, workspace);
  if (args.bias && !p.bias) add_bias(stream, args);
}

}  // namespace braze::cuda::pointwise
