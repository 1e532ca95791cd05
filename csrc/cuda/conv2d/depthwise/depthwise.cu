#include "depthwise.h"

#include <climits>

#include "plan.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"

namespace braze::cuda::depthwise {
namespace {

constexpr int kSlices = 8;

// The weights' gradients from what the blocks left: 32 channels of one tap a block, kSlices of the
// parts at a time, in a fixed order.
template <typename T>
__global__ void __launch_bounds__(32 * kSlices)
    sum_kernel(const float* partial, int workers, int channels, T* dw) {
  __shared__ float sums[kSlices][32];
  wait_for_earlier_kernels();
  const int channel = blockIdx.x * 32 + threadIdx.x, taps = gridDim.y;
  float sum = 0;
  if (channel < channels) {
#pragma unroll 8
    for (int worker = threadIdx.y; worker < workers; worker += kSlices) {
      sum += partial[(int64_t{worker} * taps + blockIdx.y) * channels + channel];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || channel >= channels) return;
  for (int slice = 1; slice < kSlices; ++slice) sum += sums[slice][threadIdx.x];
  dw[int64_t{channel} * taps + blockIdx.y] = convert<T>(sum);
}

bool is_channels_last(const Tensor4dRef& t) { return t.c == 1; }

bool is_contiguous(const Tensor4dRef& t, int64_t h, int64_t w) {
  return t.w == 1 && t.h == w && t.c == h * w;
}

bool are_channels_last(const Tensor4dRef& x, const Tensor4dRef& y) {
  return is_channels_last(x) && is_channels_last(y);
}

// The tensors as fprop has them.
struct Tensors {
  Tensor4dRef x, w, y;
};

Tensors tensors_of(const Conv2dArgs& args) {
  switch (args.pass) {
    case Conv2dPass::kFprop: return {args.gathered, args.other, args.out};
    case Conv2dPass::kDgrad: return {args.out, args.other, args.gathered};
    case Conv2dPass::kWgrad: break;
  }
  return {args.gathered, args.out, args.other};
}

// The kernel of a pass and its arguments, with their plan; false where there is none.
bool prepare(const Conv2dArgs& pass, void* workspace, Kernel* kernel, Args* args) {
  const Conv2dShape& s = pass.shape;
  const Tensors t = tensors_of(pass);
  *kernel =
      kernel_of(pass.pass, s, !(is_contiguous(t.x, s.h, s.w) && is_contiguous(t.y, s.p, s.q)));
  *args = problem_of(*kernel, pass.pass, s, t.x, t.w, t.y, pass.bias, workspace);
  kernel->tail = pass.tail != nullptr, args->tail = Tail::of(pass.tail, s.dtype);
  kernel->tiles = fits_tiles(*kernel, *args);
  return make_plan(*kernel, tuning_of(*kernel), args);
}

}  // namespace

bool supports(const Conv2dArgs& pass) {
  const Conv2dShape& s = pass.shape;
  const auto [x, w, y] = tensors_of(pass);
  const bool filter = s.groups == s.c && s.k == s.c && s.r == s.s &&
                      (s.r == 3 || s.r == 5 || s.r == 7) && s.pad_h < s.r && s.pad_w < s.s;
  const bool steps = s.stride_h == s.stride_w && (s.stride_h == 1 || s.stride_h == 2) &&
                     s.dilation_h == 1 && s.dilation_w == 1;
  if (!filter || !steps || s.dtype == DType::kFloat64) return false;
  if (w.n != s.r * s.s || w.h != s.s || w.w != 1) return false;
  const bool contiguous = is_contiguous(x, s.h, s.w) && is_contiguous(y, s.p, s.q);
  if (!contiguous && !are_channels_last(x, y)) return false;
  // 31 bits count pixels of an image, and rows of tiles.
  const int64_t rows = std::max(s.h, s.p) + s.r, strips = std::max(s.w, s.q) / 7 + 2;
  if (s.h * s.w > 1 << 30 || s.n * rows * strips > INT_MAX) return false;
  Kernel kernel;
  Args args;
  return prepare(pass, nullptr, &kernel, &args);
}

bool takes_tail(const Conv2dArgs& pass) {
  return pass.pass == Conv2dPass::kFprop && are_channels_last(pass.gathered, pass.out);
}

bool goes_by_tiles(const Conv2dArgs& pass) {
  Kernel kernel;
  Args args;
  return prepare(pass, nullptr, &kernel, &args) && kernel.tiles;
}

void plan(const Conv2dArgs& pass, Conv2dPlan* plan) {
  if (pass.pass != Conv2dPass::kWgrad) return;
  Kernel kernel;
  Args args;
  prepare(pass, nullptr, &kernel, &args);
  const Conv2dShape& s = pass.shape;
  plan->workspace_bytes = int64_t{args.workers} * s.r * s.s * s.c * 4;
}

void run(Stream stream, const Conv2dArgs& pass, const Conv2dPlan&, void* workspace) {
  Kernel kernel;
  Args args;
  if (!prepare(pass, workspace, &kernel, &args)) {
    throw std::runtime_error("conv2d: depthwise: a tile does not fit shared memory");
  }
  run_planned(stream, kernel, args, const_cast<void*>(tensors_of(pass).w.data));
}

void run_planned(Stream stream, const Kernel& kernel, const Args& args, void* dw) {
  const Function function = function_of(kernel);
  if (args.shared_bytes > 48 << 10) {
    cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, args.shared_bytes);
  }
  launch_early(function, dim3(args.workers, args.slabs), dim3(args.threads), args.shared_bytes,
               stream, args);
  check_launch("conv2d depthwise");
  if (kernel.task != Task::kWeights) return;
  dispatch(kernel.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      const dim3 grid(static_cast<unsigned>(ceil_div(args.channels, 32)),
                      kernel.taps * kernel.taps);
      launch_early(sum_kernel<T>, grid, dim3(32, kSlices), 0, stream,
                   static_cast<const float*>(args.partial), args.workers, args.channels,
                   static_cast<T*>(dw));
      check_launch("conv2d depthwise wgrad");
    }
  });
}

}  // namespace braze::cuda::depthwise
