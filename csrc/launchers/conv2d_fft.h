// Convolution by FFT, what both devices decide alike: which transforms, of what, how many at once.
// csrc/ops/conv2d_fft.cpp runs it, with torch's own transforms. No torch here.
//
// M. Mathieu, M. Henaff and Y. LeCun, "Fast training of convolutional networks through FFTs"
// (2013). Tiles by overlap-save: A. V. Oppenheim and R. W. Schafer, "Discrete-time signal
// processing", section 8.7.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "launchers/conv2d.h"

namespace braze {

// One dimension. The convolution is that of stride 1 (its positions are the grid), of which a
// strided one has every s-th position. For fprop and dgrad: of the result; for wgrad: of dy.
struct FftAxis {
  int64_t length;  // of the transforms
  int64_t step;  // grid positions of a tile, a multiple of the stride; all where there is one tile
  int64_t tiles;
};

struct FftPlan {
  FftAxis h, w;
  int64_t groups, results;  // groups at once; result channels of each (of wgrad: filters), all of
                            // them where there are several groups
  int64_t units;            // tiles of images at once
  bool by_elements;         // products one channel after the other, not as those of matrices
  int again;                // CPU: the kernel that does tiles again that are not finite
};

// One dimension of a pass, as correlation of a source on the grid with the taps.
struct FftExtents {
  FftExtents(Conv2dPass pass, int64_t in, int64_t out, int64_t taps, int64_t stride, int64_t pad,
             int64_t dilation)
      : reach(dilation * (taps - 1) + 1) {
    const int64_t grid = (out - 1) * stride + 1;
    const bool is_dgrad = pass == Conv2dPass::kDgrad;
    result = is_dgrad ? in : grid;
    source = is_dgrad ? grid : in;
    result_stride = is_dgrad ? 1 : stride;
    source_stride = is_dgrad ? stride : 1;
    lead = is_dgrad ? reach - 1 - pad : pad;
  }
  // The least length with which one transform will do. What is read beyond it wraps around, to
  // where there has to be padding as well.
  int64_t whole() const {
    const int64_t window = result + reach - 1;
    const int64_t first = std::max<int64_t>(lead, 0), end = std::min(lead + source, window);
    return std::max({result, end, window - first, reach});
  }

  int64_t reach;           // of the filter, dilated
  int64_t result, source;  // grid positions
  int64_t result_stride, source_stride;
  int64_t lead;  // zeros in front of the source; negative: what is never read
};

inline FftExtents fft_rows(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  return {problem.pass, s.h, s.p, s.r, s.stride_h, s.pad_h, s.dilation_h};
}
inline FftExtents fft_columns(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  return {problem.pass, s.w, s.q, s.s, s.stride_w, s.pad_w, s.dilation_w};
}

// The even numbers from `least` on, without prime factors above 7, up to the first that is at least
// `most`: lengths that every library has fast transforms of.
inline std::vector<int64_t> fft_lengths(int64_t least, int64_t most) {
  std::vector<int64_t> found;
  for (int64_t length = least + least % 2; found.empty() || found.back() < most; length += 2) {
    int64_t rest = length;
    for (const int64_t prime : {2, 3, 5, 7}) {
      while (rest % prime == 0) rest /= prime;
    }
    if (rest == 1) found.push_back(length);
  }
  return found;
}

// Axes that may be worth it: tiles of some reaches of the filter, and the whole.
inline std::vector<FftAxis> fft_axes(const FftExtents& e) {
  constexpr int64_t kLeastTile = 32, kMostReaches = 12;
  const int64_t whole = fft_lengths(e.whole(), e.whole()).front(), stride = e.result_stride;
  std::vector<FftAxis> axes{{whole, ceil_div(e.result, stride) * stride, 1}};
  const int64_t most = std::min(whole - 1, std::max(kMostReaches * e.reach, 8 * kLeastTile));
  for (const int64_t length : fft_lengths(std::max(e.reach, kLeastTile), most)) {
    const int64_t step = (length - e.reach + 1) / stride * stride;
    if (length < whole && step > 0) axes.push_back({length, step, ceil_div(e.result, step)});
  }
  return axes;
}

// What a pass costs with some axes, in nanoseconds of a thread of an AMD EPYC with AVX-512 under
// MKL's transforms, a chunk of which takes about as long per point from 30 x 30 to 512 x 512.
class FftCost {
 public:
#ifdef BRAZE_CUDA
  static constexpr int64_t kWorkspaceBytes = int64_t{1} << 30;
#else
  static constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;
#endif

  explicit FftCost(const Conv2dProblem& problem) : is_wgrad_(problem.pass == Conv2dPass::kWgrad) {
    const Conv2dShape& s = problem.shape;
    images_ = s.n, groups_ = s.groups;
    sources_ = s.c / s.groups, results_ = s.k / s.groups;
    if (problem.pass == Conv2dPass::kDgrad) std::swap(sources_, results_);
    complex_ = s.dtype == DType::kFloat64 ? 16 : 8;
  }

  // Fills all of the plan but its axes, which are given; returns its time.
  double complete(FftPlan* plan) const {
    const int64_t points = plan->h.length * plan->w.length;
    const int64_t frequencies = plan->h.length * (plan->w.length / 2 + 1);
    const int64_t units = images_ * plan->h.tiles * plan->w.tiles;
    // Bytes for a group's filters, spectra and what they are rearranged to, and for a tile of an
    // image: what is transformed, its spectrum, what that is rearranged to.
    const auto filter_bytes = [&](int64_t results) {
      return 3 * results * sources_ * frequencies * complex_;
    };
    const auto unit_bytes = [&](int64_t results) {
      return (is_wgrad_ ? 3 : 4) * (sources_ + results) * frequencies * complex_;
    };
    plan->groups = groups_, plan->results = results_;
    const auto fits = [&] {
      return plan->groups * (filter_bytes(plan->results) + unit_bytes(plan->results)) <=
             kWorkspaceBytes;
    };
    while (!fits() && plan->groups > 1) plan->groups = ceil_div(plan->groups, 2);
    while (!fits() && plan->results > 1) plan->results = ceil_div(plan->results, 2);
    const int64_t rest = kWorkspaceBytes - plan->groups * filter_bytes(plan->results);
    plan->units = std::clamp<int64_t>(rest / (plan->groups * unit_bytes(plan->results)), 1, units);
    const int64_t terms = is_wgrad_ ? plan->units : sources_;
    const int64_t rows = is_wgrad_ ? plan->results : plan->units;
    const int64_t columns = is_wgrad_ ? sources_ : plan->results;
    // Matrix products want their operands rearranged, and two of three extents.
    plan->by_elements = is_wgrad_ ? rows * columns <= 4 : terms <= 4 || rows * columns <= 4;

    // Copies included, which for many filters, all of them at once, go through memory.
    constexpr double kCached = 8 << 20;
    const double forward = 3. * points, back = 5. * points;
    const double at_once = 1. * plan->groups * sources_ * plan->results * frequencies * complex_;
    const double of_taps = (is_wgrad_ ? back : forward) * (at_once > kCached ? 2 : 1);
    const double blocks = ceil_div(results_, plan->results), all = groups_ * sources_ * results_;
    // The source is transformed anew for each block of results.
    const double sources = groups_ * sources_ * units * blocks,
                 results = groups_ * results_ * units;
    const double multiplied = (plan->by_elements ? 0.7 : 0.25) * frequencies * all * units;
    const double moved = plan->by_elements ? 0 : 3. * frequencies;
    constexpr double kOverhead = 30e3;  // of a round of calls
    const double time = multiplied + all * (moved + of_taps) + sources * (forward + moved) +
                        results * ((is_wgrad_ ? forward : back) + moved);
    return time + kOverhead * blocks * ceil_div(units, plan->units) + 1e3 * units * blocks;
  }

 private:
  bool is_wgrad_;
  int64_t images_, groups_, complex_;
  // Channels of a group that are transformed and transformed back; of wgrad those of x and of dy.
  int64_t sources_, results_;
};

// Why it cannot take a problem, or nullptr. Strides cost the transforms of the stride of 1.
inline const char* fft_obstacle(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  constexpr int64_t kMostStride = 4, kMostReach = 1 << 12;
  if (std::max(s.stride_h, s.stride_w) > kMostStride) return "fft takes strides of up to 4";
  if (std::max(fft_rows(problem).reach, fft_columns(problem).reach) > kMostReach) {
    return "fft takes filters that reach over up to 4096 rows and columns";
  }
  return nullptr;
}

// The cheapest plan for the problem, and its time by FftCost. again: as in FftPlan.
inline double plan_fft(const Conv2dProblem& problem, int again, FftPlan* best) {
  const FftCost cost(problem);
  const std::vector<FftAxis> rows = fft_axes(fft_rows(problem));
  const std::vector<FftAxis> columns = fft_axes(fft_columns(problem));
  double least = -1;
  for (const FftAxis& h : rows) {
    for (const FftAxis& w : columns) {
      FftPlan plan{h, w, 0, 0, 0, false, again};
      const double time = cost.complete(&plan);
      if (least < 0 || time < least) least = time, *best = plan;
    }
  }
  return least;
}

// The same as a row of a device's table has it.
inline void plan_by_fft(const Conv2dProblem& problem, int again, Conv2dPlan* plan) {
  FftPlan fft;
  plan_fft(problem, again, &fft);
  plan->tiling.set(fft);
  plan->by_fft = true;
  plan->adds_bias = true;
}

#ifdef BRAZE_CUDA
namespace cuda {

// What of a pass has been transformed back.
struct FftPart {
  int64_t group, groups;    // the first one and how many
  int64_t result, results;  // likewise, as in FftPlan; of each group
  int64_t unit, units;      // likewise; wgrad: of no meaning
};

// Writes that part of the result: crops `back`, of [groups, units, results, h.length, w.length] (of
// wgrad [groups, results, channels, ...]) dense elements in the accumulation type, adds the bias of
// the result's channels, unless it is nullptr, and converts. What is not finite is computed again,
// directly.
void store_fft_results(Stream stream, const Conv2dProblem& problem, const FftPlan& plan,
                       const FftPart& part, const void* back, const void* bias);

}  // namespace cuda
#endif

}  // namespace braze
