// Convolution: implicit GEMM (convolve.h, wgrad.h), and the formula as plain loops.
#include "launchers/conv2d.h"

#include <algorithm>

#include "cpu/conv2d/convolve.h"
#include "cpu/conv2d/wgrad.h"
#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

std::vector<int64_t> shifts(int64_t taps, int64_t dilation, int64_t pad) {
  std::vector<int64_t> result;
  for (int64_t t = 0; t < taps; ++t) result.push_back(t * dilation - pad);
  return result;
}

std::vector<int64_t> iota(int64_t n) {
  std::vector<int64_t> result;
  for (int64_t i = 0; i < n; ++i) result.push_back(i);
  return result;
}

Convolution fprop_of(const Conv2dProblem& problem, const void* bias) {
  const auto& [pass, s, x, w, y] = problem;
  const int64_t filters = s.k / s.groups;
  return {s.n,
          s.groups,
          s.c / s.groups,
          filters,
          Axis(s.p, s.stride_h, s.h, shifts(s.r, s.dilation_h, s.pad_h)),
          Axis(s.q, s.stride_w, s.w, shifts(s.s, s.dilation_w, s.pad_w)),
          x,
          w.data,
          filters * w.n,
          w.n,
          w.c,
          w.h,
          w.w,
          iota(s.r),
          iota(s.s),
          const_cast<void*>(y.data),
          y,
          bias};
}

// The input positions first, first + stride, ... and the taps that reach them, with the shift from
// there to the output position they come from.
struct Residue {
  Residue(int64_t first, int64_t extent, int64_t out, int64_t stride, int64_t pad, int64_t taps,
          int64_t dilation)
      : positions(ceil_div(extent - first, stride)), out(out) {
    for (int64_t t = 0; t < taps; ++t) {
      const int64_t distance = first + pad - t * dilation;
      if (distance % stride != 0) continue;
      tap.push_back(t);
      shift.push_back(distance / stride);
    }
  }
  Axis axis() const { return Axis(positions, 1, out, shift); }

  int64_t positions, out;
  std::vector<int64_t> tap, shift;
};

// Calls f(convolution) for each residue of the input position modulo the stride.
template <typename F>
void for_each_dgrad(const Conv2dProblem& problem, const void* bias, const F& f) {
  const auto& [pass, s, dx, w, dy] = problem;
  const int64_t channels = s.c / s.groups, filters = s.k / s.groups;
  for (int64_t i = 0; i < std::min(s.stride_h, s.h); ++i) {
    const Residue h(i, s.h, s.p, s.stride_h, s.pad_h, s.r, s.dilation_h);
    for (int64_t j = 0; j < std::min(s.stride_w, s.w); ++j) {
      const Residue v(j, s.w, s.q, s.stride_w, s.pad_w, s.s, s.dilation_w);
      // At this point of the residue, in units of the element size.
      char* to =
          static_cast<char*>(const_cast<void*>(dx.data)) + (i * dx.h + j * dx.w) * size_of(s.dtype);
      const Tensor4dRef strides{to, dx.n, dx.c, dx.h * s.stride_h, dx.w * s.stride_w};
      f(Convolution{s.n, s.groups, filters, channels, h.axis(), v.axis(), dy, w.data, filters * w.n,
                    w.c, w.n, w.h, w.w, h.tap, v.tap, to, strides, bias});
    }
  }
}

WeightGradient wgrad_of(const Conv2dProblem& problem) {
  const auto& [pass, s, x, dw, dy] = problem;
  return {s.n,
          s.groups,
          s.c / s.groups,
          s.k / s.groups,
          Axis(s.p, s.stride_h, s.h, shifts(s.r, s.dilation_h, s.pad_h)),
          Axis(s.q, s.stride_w, s.w, shifts(s.s, s.dilation_w, s.pad_w)),
          x,
          dy,
          dw};
}

template <typename T>
T& at(const Tensor4dRef& t, int64_t n, int64_t c, int64_t h, int64_t w) {
  return static_cast<T*>(const_cast<void*>(t.data))[n * t.n + c * t.c + h * t.h + w * t.w];
}

// Calls f(n, k, c, p, q, r, s, h, w) for every term of the formula, c being the input's channel.
template <typename F>
void for_each_term(const Conv2dShape& v, const F& f) {
  const int64_t channels = v.c / v.groups, filters = v.k / v.groups;
  for (int64_t n = 0; n < v.n; ++n) {
    for (int64_t k = 0; k < v.k; ++k) {
      for (int64_t p = 0; p < v.p; ++p) {
        for (int64_t q = 0; q < v.q; ++q) {
          for (int64_t c = 0; c < channels; ++c) {
            for (int64_t r = 0; r < v.r; ++r) {
              for (int64_t s = 0; s < v.s; ++s) {
                const int64_t h = p * v.stride_h - v.pad_h + r * v.dilation_h;
                const int64_t w = q * v.stride_w - v.pad_w + s * v.dilation_w;
                if (h < 0 || h >= v.h || w < 0 || w >= v.w) continue;
                f(n, k, c, p, q, r, s, h, w, k / filters * channels + c);
              }
            }
          }
        }
      }
    }
  }
}

// Sums of one pass in a dense array of the accumulation type, then rounded into the result.
template <typename T>
class DirectSums {
 public:
  DirectSums(void* workspace, const Tensor4dRef& result, int64_t n, int64_t c, int64_t h, int64_t w)
      : sums_(static_cast<acc_t<T>*>(workspace)), result_(result), n_(n), c_(c), h_(h), w_(w) {
    std::fill_n(sums_, n * c * h * w, acc_t<T>(0));
  }
  acc_t<T>& operator()(int64_t n, int64_t c, int64_t h, int64_t w) {
    return sums_[((n * c_ + c) * h_ + h) * w_ + w];
  }
  void store(const T* bias) {
    for (int64_t n = 0; n < n_; ++n) {
      for (int64_t c = 0; c < c_; ++c) {
        for (int64_t h = 0; h < h_; ++h) {
          for (int64_t w = 0; w < w_; ++w) {
            const acc_t<T> shift = bias ? acc_t<T>(bias[c]) : acc_t<T>(0);
            at<T>(result_, n, c, h, w) = T((*this)(n, c, h, w) + shift);
          }
        }
      }
    }
  }

 private:
  acc_t<T>* sums_;
  const Tensor4dRef& result_;
  int64_t n_, c_, h_, w_;
};

// Images that a task sums before the partial sums are added, the same for any number of threads.
constexpr int64_t kSumImages = 16;

// sums[c] += the sum of channel c of an image. Runs of pixels are summed first (in `row`, c
// values), and their sums in float64: short chains of additions round less.
template <typename T>
void sum_image(double* __restrict__ sums, acc_t<T>* __restrict__ row, const T* dy,
               const Tensor4dRef& s, int64_t channels, int64_t height, int64_t width) {
  using Acc = acc_t<T>;
  if (s.w == 1 && s.h == width) {  // a plane without gaps is one long row
    width *= height;
    height = 1;
  }
  for (int64_t i = 0; i < height; ++i, dy += s.h) {
    if (s.c == 1 && s.w != 1) {
      constexpr int64_t kRun = 32;
      for (int64_t first = 0; first < width; first += kRun) {
        std::fill_n(row, channels, Acc(0));
        for (int64_t j = first; j < std::min(width, first + kRun); ++j) {
          for (int64_t c = 0; c < channels; ++c) row[c] += Acc(dy[j * s.w + c]);
        }
        for (int64_t c = 0; c < channels; ++c) sums[c] += row[c];
      }
      continue;
    }
    for (int64_t c = 0; c < channels; ++c) {
      const T* from = dy + c * s.c;
      vec8_t<Acc> lanes[4] = {};
      int64_t j = 0;
      if (s.w == 1) {
        for (; j + 32 <= width; j += 32) {
          for (int l = 0; l < 4; ++l) lanes[l] += load8(from + j + 8 * l);
        }
        for (; j + 8 <= width; j += 8) lanes[0] += load8(from + j);
      } else {
        for (; j + 8 <= width; j += 8) {
          for (int l = 0; l < 8; ++l) lanes[0][l] += Acc(from[(j + l) * s.w]);
        }
      }
      lanes[0] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
      Acc sum = 0;
      for (; j < width; ++j) sum += Acc(from[j * s.w]);
      for (int l = 0; l < 8; ++l) sum += lanes[0][l];
      sums[c] += sum;
    }
  }
}

// An input gradient of a stride greater than 1 is several convolutions, planned one by one as they
// run; all others are one, whose plan is kept.
bool is_single(const Conv2dProblem& problem) {
  return problem.pass != Conv2dPass::kDgrad ||
         (problem.shape.stride_h == 1 && problem.shape.stride_w == 1);
}

void plan_implicit_gemm(const Conv2dProblem& problem, Conv2dPlan* plan) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using Acc = acc_t<typename decltype(tag)::type>;
    const auto add = [&](const auto& tiling, int64_t bytes) {
      plan->tiling.set(tiling);
      plan->workspace_bytes = std::max(plan->workspace_bytes, bytes);
    };
    if (problem.pass == Conv2dPass::kWgrad) {
      const WeightGradient g = wgrad_of(problem);
      const WeightGradientPlan<Acc> tiling(g);
      return add(tiling, tiling.bytes(g));
    }
    const auto add_convolution = [&](const Convolution& conv) {
      const ConvolutionPlan<Acc> tiling(conv);
      add(tiling, tiling.bytes());
    };
    if (problem.pass == Conv2dPass::kFprop) return add_convolution(fprop_of(problem, nullptr));
    for_each_dgrad(problem, nullptr, add_convolution);
  });
}

void run_implicit_gemm(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                       void* workspace) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Acc = acc_t<T>;
    if (problem.pass == Conv2dPass::kWgrad) {
      const auto& tiling = plan.tiling.get<WeightGradientPlan<Acc>>();
      return ComputeWeightGradient<T>(wgrad_of(problem), tiling, workspace).run();
    }
    const auto& tiling = plan.tiling.get<ConvolutionPlan<Acc>>();
    if (problem.pass == Conv2dPass::kFprop) {
      const Convolution conv = fprop_of(problem, bias);
      return Convolve<T>(conv, tiling, workspace).run();
    }
    for_each_dgrad(problem, bias, [&](const Convolution& conv) {
      Convolve<T>(conv, is_single(problem) ? tiling : ConvolutionPlan<Acc>(conv), workspace).run();
    });
  });
}

void plan_direct(const Conv2dProblem& problem, Conv2dPlan* plan) {
  const Conv2dShape& s = problem.shape;
  const int64_t results = problem.pass == Conv2dPass::kFprop   ? s.n * s.k * s.p * s.q
                          : problem.pass == Conv2dPass::kDgrad ? s.n * s.c * s.h * s.w
                                                               : s.k * (s.c / s.groups) * s.r * s.s;
  plan->workspace_bytes = results * (s.dtype == DType::kFloat64 ? 8 : 4);
}

void run_direct(const Conv2dProblem& problem, const Conv2dPlan&, const void* bias,
                void* workspace) {
  const auto& [pass, shape, x, w, y] = problem;
  dispatch(shape.dtype, [&, pass = pass, &s = shape, &x = x, &w = w, &y = y](auto tag) {
    using T = typename decltype(tag)::type;
    using Acc = acc_t<T>;
    const int64_t extents[3][4] = {
        {s.n, s.k, s.p, s.q}, {s.n, s.c, s.h, s.w}, {s.k, s.c / s.groups, s.r, s.s}};
    const auto& e = extents[static_cast<int>(pass)];
    DirectSums<T> sums(workspace, problem.result(), e[0], e[1], e[2], e[3]);
    for_each_term(s, [&](int64_t n, int64_t k, int64_t c, int64_t p, int64_t q, int64_t r,
                         int64_t v, int64_t h, int64_t u, int64_t channel) {
      switch (pass) {
        case Conv2dPass::kFprop:
          sums(n, k, p, q) += Acc(at<T>(x, n, channel, h, u)) * Acc(at<T>(w, k, c, r, v));
          break;
        case Conv2dPass::kDgrad:
          sums(n, channel, h, u) += Acc(at<T>(y, n, k, p, q)) * Acc(at<T>(w, k, c, r, v));
          break;
        case Conv2dPass::kWgrad:
          sums(k, c, r, v) += Acc(at<T>(y, n, k, p, q)) * Acc(at<T>(x, n, channel, h, u));
          break;
      }
    });
    sums.store(static_cast<const T*>(bias));
  });
}

struct Kernel {
  KernelInfo info;
  void (*plan)(const Conv2dProblem&, Conv2dPlan*);
  void (*run)(const Conv2dProblem&, const Conv2dPlan&, const void* bias, void* workspace);
};

// The first one is what "auto" takes.
constexpr Kernel kKernels[] = {
    {{"conv2d", "implicit_gemm", "float64 float32 bfloat16 float16", "cpu", true,
      "register tiles on shifted windows of a padded copy, threads"},
     plan_implicit_gemm,
     run_implicit_gemm},
    {{"conv2d", "direct", "float64 float32 bfloat16 float16", "cpu", false,
      "the formula as plain loops"},
     plan_direct,
     run_direct},
};
constexpr int kCount = std::size(kKernels);
const KernelEntries kEntries(kKernels, kCount);

}  // namespace

const KernelInfo* conv2d_kernel(int number) {
  return number < kCount ? &kKernels[number].info : nullptr;
}

Conv2dPlan plan_conv2d(const Conv2dProblem& problem, int kernel) {
  Conv2dPlan plan;
  plan.kernel = std::max(0, kernel);
  kKernels[plan.kernel].plan(problem, &plan);
  return plan;
}

void run_conv2d(Stream, const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                Moments*, void* workspace) {
  kKernels[plan.kernel].run(problem, plan, bias, workspace);
}

int64_t channel_sum_workspace_bytes(DType dtype, int64_t n, int64_t c, int64_t, int64_t) {
  // Per block of images, c sums in float64 and c values of a row.
  return ceil_div(n, kSumImages) * c * (8 + (dtype == DType::kFloat64 ? 8 : 4));
}

void channel_sum(Stream, DType dtype, int64_t n, int64_t c, int64_t h, int64_t w,
                 const Tensor4dRef& dy, void* out, void* workspace) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Acc = acc_t<T>;
    const T* data = static_cast<const T*>(dy.data);
    const int64_t blocks = ceil_div(n, kSumImages);
    double* partial = static_cast<double*>(workspace);
    Acc* rows = reinterpret_cast<Acc*>(partial + blocks * c);
    parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        double* sums = partial + block * c;
        Acc* row = rows + block * c;
        std::fill_n(sums, c, 0.0);
        for (int64_t i = block * kSumImages; i < std::min(n, (block + 1) * kSumImages); ++i) {
          sum_image(sums, row, data + i * dy.n, dy, c, h, w);
        }
      }
    });
    for (int64_t j = 0; j < c; ++j) {
      double sum = 0;
      for (int64_t block = 0; block < blocks; ++block) sum += partial[block * c + j];
      static_cast<T*>(out)[j] = T(static_cast<Acc>(sum));
    }
  });
}

}  // namespace braze::cpu
