// The first rung of the convolution's ladder, and its executable specification: the formula as
// plain loops, one thread, every term added to its sum in memory. An input element is read once for
// every filter and every tap, a sum as often as it has terms.
#include <algorithm>

#include "cpu/common/numeric.h"
#include "cpu/conv2d/kernels.h"

namespace braze::cpu {
namespace {

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

}  // namespace

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

}  // namespace braze::cpu
