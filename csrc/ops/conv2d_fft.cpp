// Convolution by FFT (launchers/conv2d_fft.h says how it is planned). What is transformed is copied
// into tiles with zeros around, in the type that is computed in; spectra are multiplied and summed
// over channels; what comes back is cropped. For wgrad images and tiles are summed as spectra, so
// that there is one way back.
//
// A convolution of neural networks is a correlation, whose spectrum has the conjugate of the
// filter's. dgrad is the same with the filter turned by 180 degrees.
#include "ops/conv2d_fft.h"

#include <array>
#include <cmath>

#include "launchers/conv2d_fft.h"
#include "ops/backend.h"

namespace braze {
namespace {

using Sizes = std::vector<int64_t>;

// One of torch's own ops with one result.
template <typename... Args>
Tensor call(const char* op, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor permuted(const Tensor& t, const Sizes& order) { return call("aten::permute", "", t, order); }
Tensor conjugate(const Tensor& t) { return call("aten::conj", "", t); }
// Some libraries leave their results in another order in memory.
Tensor spectrum(const Tensor& t) {
  return as_contiguous(call("aten::fft_rfft2", "", t, std::optional<Sizes>(), Sizes{-2, -1},
                            std::optional<std::string>()));
}
Tensor spectrum_back(const Tensor& t, int64_t h, int64_t w) {
  return as_contiguous(call("aten::fft_irfft2", "", t, std::optional<Sizes>(Sizes{h, w}),
                            Sizes{-2, -1}, std::optional<std::string>()));
}
Tensor product(const Tensor& a, const Tensor& b) { return call("aten::mul", "Tensor", a, b); }
// (The stable ABI has no ops with a Scalar among their arguments, but this one.)
Tensor sum(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

// The elements of one dimension that a tile has.
struct Range {
  int64_t first, count;  // elements
  int64_t at;            // where the first one lies in the tile; the next ones a stride further
};

// Of a source, at the grid position `from` of which the tile begins; below `limit` in the tile.
Range source_range(int64_t from, int64_t limit, int64_t extent, int64_t stride) {
  const int64_t first = ceil_div(std::max<int64_t>(from, 0), stride);
  const int64_t end = std::min(extent, from + limit <= 0 ? 0 : ceil_div(from + limit, stride));
  return {first, std::max<int64_t>(end - first, 0), first * stride - from};
}

Range result_range(int64_t from, int64_t step, int64_t extent, int64_t stride) {
  const int64_t first = from / stride;
  return {first, std::min(extent - first, step / stride), 0};
}

// A tensor of images, or of one per unit, by pointer and strides in elements.
struct Images {
  void* data;
  int64_t channels, h, w;  // extents
  int64_t stride_h, stride_w;
  Tensor4dRef strides;
};

class ByFft {
 public:
  ByFft(Stream stream, const Conv2dProblem& problem, const FftPlan& plan, const void* bias,
        const Tensor& like)
      : stream_(stream),
        problem_(problem),
        shape_(problem.shape),
        plan_(plan),
        rows_(fft_rows(problem)),
        columns_(fft_columns(problem)),
        like_(like),
        bias_(bias),
        channels_(shape_.c / shape_.groups),
        filters_(shape_.k / shape_.groups),
        frequencies_(plan.h.length * (plan.w.length / 2 + 1)) {
    type_ = like.scalar_type();
    real_ = type_ == ScalarType::Double ? type_ : ScalarType::Float;
  }

  void run() {
    const int64_t units = shape_.n * plan_.h.tiles * plan_.w.tiles;
    for (group_ = 0; group_ < shape_.groups; group_ += plan_.groups) {
      groups_ = std::min(plan_.groups, shape_.groups - group_);
      for (filter_ = 0; filter_ < filters_; filter_ += plan_.filters) {
        block_ = std::min(plan_.filters, filters_ - filter_);
        if (problem_.pass == Conv2dPass::kWgrad) {
          weight_gradient(units);
        } else {
          convolve(units);
        }
      }
    }
    repair();
  }

 private:
  // Where a unit, a tile of an image, begins on the grid.
  struct Unit {
    int64_t image, h, w;
  };
  Unit unit(int64_t i) const {
    const int64_t tiles = plan_.h.tiles * plan_.w.tiles;
    return {i / tiles, i % tiles / plan_.w.tiles * plan_.h.step,
            i % tiles % plan_.w.tiles * plan_.w.step};
  }

  Tensor blob(const void* data, const Sizes& sizes, const Sizes& strides, ScalarType type) const {
    return torch::stable::from_blob(const_cast<void*>(data), sizes, strides, like_.device(), type);
  }
  int64_t element_size(ScalarType type) const {
    return type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 2;
  }
  const void* shifted(const void* data, int64_t elements, ScalarType type) const {
    return static_cast<const char*>(data) + elements * element_size(type);
  }

  // x's channels, or y's filters, of the groups at work.
  const Tensor4dRef& ref(bool of_x) const { return of_x ? problem_.x : problem_.y; }
  int64_t first_channel(bool of_x) const {
    return of_x ? group_ * channels_ : group_ * filters_ + filter_;
  }
  int64_t count(bool of_x) const { return of_x ? groups_ * channels_ : groups_ * block_; }

  // A part of x or y as a tensor, of an image.
  Tensor part(bool of_x, int64_t image, const Range& h, const Range& w) const {
    const Tensor4dRef& t = ref(of_x);
    const int64_t at = image * t.n + first_channel(of_x) * t.c + h.first * t.h + w.first * t.w;
    return blob(shifted(t.data, at, type_), {count(of_x), h.count, w.count}, {t.c, t.h, t.w},
                type_);
  }

  // Tiles of x or of y, with zeros around: [units, channels, length, length].
  // stride, lead: of that tensor on the grid. limit_h, limit_w: how much of a tile may be filled.
  Tensor tiles(bool of_x, int64_t first, int64_t units, int64_t stride_h, int64_t stride_w,
               int64_t lead_h, int64_t lead_w, int64_t limit_h, int64_t limit_w) const {
    const int64_t channels = count(of_x), row = plan_.w.length, plane = plan_.h.length * row;
    const int64_t h = of_x ? shape_.h : shape_.p, w = of_x ? shape_.w : shape_.q;
    std::vector<std::pair<Range, Range>> ranges;
    bool is_full = true;
    for (int64_t i = 0; i < units; ++i) {
      const Unit at = unit(first + i);
      ranges.push_back({source_range(at.h - lead_h, limit_h, h, stride_h),
                        source_range(at.w - lead_w, limit_w, w, stride_w)});
      is_full &= ranges.back().first.count == plan_.h.length &&
                 ranges.back().second.count == plan_.w.length;
    }
    const Sizes sizes{units, channels, plan_.h.length, plan_.w.length};
    const Tensor all = is_full ? empty(sizes, like_, real_) : zeros(sizes, like_, real_);
    // Images of one tile each are one copy.
    const bool at_once = plan_.h.tiles * plan_.w.tiles == 1;
    for (int64_t i = 0; i < units; i += at_once ? units : 1) {
      const auto& [rows, columns] = ranges[i];
      if (rows.count == 0 || columns.count == 0) continue;
      const int64_t images = at_once ? units : 1;
      const Tensor4dRef& t = ref(of_x);
      const int64_t from = unit(first + i).image * t.n + first_channel(of_x) * t.c +
                           rows.first * t.h + columns.first * t.w;
      const Sizes extents{images, channels, rows.count, columns.count};
      Tensor to = blob(
          shifted(all.const_data_ptr(), i * channels * plane + rows.at * row + columns.at, real_),
          extents, {channels * plane, plane, stride_h * row, stride_w}, real_);
      torch::stable::copy_(
          to, blob(shifted(t.data, from, type_), extents, {t.n, t.c, t.h, t.w}, type_));
    }
    return all;
  }

  // Spectra of tiles, [units, groups, channels of a group, frequencies].
  Tensor spectra(bool of_x, const Tensor& tiles) const {
    const Tensor all = spectrum(tiles);
    return torch::stable::view(
        all, Sizes{tiles.size(0), groups_, of_x ? channels_ : block_, frequencies_});
  }

  // The source of fprop or dgrad.
  Tensor source_spectra(int64_t first, int64_t units) const {
    const bool of_x = problem_.pass == Conv2dPass::kFprop;
    return spectra(of_x, tiles(of_x, first, units, rows_.source_stride, columns_.source_stride,
                               rows_.lead, columns_.lead, plan_.h.length, plan_.w.length));
  }

  // The weights at work as a tensor of `type` memory at `data`.
  Tensor weights(const void* data) const {
    const Tensor4dRef& w = problem_.w;
    const int64_t first = group_ * filters_ + filter_;
    return blob(shifted(data, first * w.n, type_), {groups_, block_, channels_, shape_.r, shape_.s},
                {filters_ * w.n, w.n, w.c, w.h, w.w}, type_);
  }

  // Conjugate spectra of the filters: [groups, filters, channels, frequencies].
  Tensor filter_spectra() const {
    const int64_t row = plan_.w.length, plane = plan_.h.length * row;
    const Tensor padded = zeros({groups_, block_, channels_, plan_.h.length, row}, like_, real_);
    Tensor taps = blob(padded.const_data_ptr(), {groups_, block_, channels_, shape_.r, shape_.s},
                       {block_ * channels_ * plane, channels_ * plane, plane,
                        shape_.dilation_h * row, shape_.dilation_w},
                       real_);
    const Tensor given = weights(problem_.w.data);
    const bool turned = problem_.pass == Conv2dPass::kDgrad;
    torch::stable::copy_(taps, turned ? call("aten::flip", "", given, Sizes{3, 4}) : given);
    const Tensor all = spectrum(padded);
    return torch::stable::view(all, Sizes{groups_, block_, channels_, frequencies_});
  }

  // fprop and dgrad.
  void convolve(int64_t all_units) {
    const bool is_dgrad = problem_.pass == Conv2dPass::kDgrad;
    const int64_t results = is_dgrad ? channels_ : block_, terms = is_dgrad ? block_ : channels_;
    Tensor w = filter_spectra();
    if (plan_.by_elements) {
      w = call("aten::conj_physical_", "", w);
    } else {
      w = torch::stable::contiguous(
          permuted(conjugate(w), is_dgrad ? Sizes{0, 3, 1, 2} : Sizes{0, 3, 2, 1}));
      w = torch::stable::view(w, Sizes{groups_ * frequencies_, terms, results});
    }
    for (int64_t first = 0; first < all_units; first += plan_.units) {
      const int64_t units = std::min(plan_.units, all_units - first);
      const Tensor back = spectrum_back(
          torch::stable::view(
              plan_.by_elements ? by_elements(source_spectra(first, units), w, terms)
                                : by_matrices(source_spectra(first, units), w, terms, results),
              Sizes{units, groups_ * results, plan_.h.length, plan_.w.length / 2 + 1}),
          plan_.h.length, plan_.w.length);
      store(back, first, units);
    }
  }

  // x: [units, groups, terms, frequencies]; the result: [units, groups, results, frequencies].
  Tensor by_elements(const Tensor& x, const Tensor& w, int64_t terms) const {
    const bool is_dgrad = problem_.pass == Conv2dPass::kDgrad;
    Tensor all;
    for (int64_t i = 0; i < terms; ++i) {
      const Tensor with = torch::stable::select(w, is_dgrad ? 1 : 2, i);
      const Tensor from = terms > 1 ? call("aten::narrow", "", x, int64_t{2}, i, int64_t{1}) : x;
      const Tensor term = product(from, with);
      all = i == 0 ? term : sum(all, term);
    }
    return all;
  }

  // The same, w: [groups * frequencies, terms, results].
  Tensor by_matrices(const Tensor& x, const Tensor& w, int64_t terms, int64_t results) const {
    const int64_t units = x.size(0);
    const Tensor rows = torch::stable::view(torch::stable::contiguous(permuted(x, {1, 3, 0, 2})),
                                            Sizes{groups_ * frequencies_, units, terms});
    const Tensor all = torch::stable::view(call("aten::bmm", "", rows, w),
                                           Sizes{groups_, frequencies_, units, results});
    return torch::stable::contiguous(permuted(all, {2, 0, 3, 1}));
  }

  // What came back, cropped, with the bias, to where it belongs.
  void store(const Tensor& back, int64_t first, int64_t units) {
    const bool of_x = problem_.pass == Conv2dPass::kDgrad;
    const Tensor4dRef& t = ref(of_x);
    const int64_t channels = count(of_x), row = plan_.w.length, plane = plan_.h.length * row;
    const bool at_once = plan_.h.tiles * plan_.w.tiles == 1;
    const int64_t images = at_once ? units : 1;
    std::optional<Tensor> bias;
    if (bias_) {
      bias = blob(shifted(bias_, first_channel(of_x), type_), {channels, 1, 1}, {1, 1, 1}, type_);
    }
    for (int64_t i = 0; i < units; i += images) {
      const Unit at = unit(first + i);
      const Range h =
          result_range(at.h, plan_.h.step, of_x ? shape_.h : shape_.p, rows_.result_stride);
      const Range w =
          result_range(at.w, plan_.w.step, of_x ? shape_.w : shape_.q, columns_.result_stride);
      const Sizes extents{images, channels, h.count, w.count};
      const Tensor from =
          blob(shifted(back.const_data_ptr(), i * channels * plane, real_), extents,
               {channels * plane, plane, rows_.result_stride * row, columns_.result_stride}, real_);
      const int64_t to_element =
          at.image * t.n + first_channel(of_x) * t.c + h.first * t.h + w.first * t.w;
      Tensor to = blob(shifted(t.data, to_element, type_), extents, {t.n, t.c, t.h, t.w}, type_);
      torch::stable::copy_(to, bias ? sum(from, *bias) : from);
      for (int64_t image = 0; image < images; ++image) {
        note(images > 1 ? torch::stable::select(from, 0, image) : from, first + i + image);
      }
    }
  }

  void weight_gradient(int64_t all_units) {
    Tensor all;
    const FftExtents &h = rows_, &w = columns_;
    for (int64_t first = 0; first < all_units; first += plan_.units) {
      const int64_t units = std::min(plan_.units, all_units - first);
      Tensor dy = spectra(false, tiles(false, first, units, h.result_stride, w.result_stride, 0, 0,
                                       plan_.h.step, plan_.w.step));
      Tensor x = spectra(
          true, tiles(true, first, units, 1, 1, h.lead, w.lead, plan_.h.length, plan_.w.length));
      if (plan_.by_elements) {
        dy = call("aten::conj_physical_", "", dy);
        const Tensor terms =
            product(torch::stable::unsqueeze(dy, 3), torch::stable::unsqueeze(x, 2));
        const Tensor part =
            units == 1 ? torch::stable::select(terms, 0, 0)
                       : call("aten::sum", "dim_IntList", terms, std::optional<Sizes>(Sizes{0}),
                              false, std::optional<ScalarType>());
        all = first == 0 ? part : sum(all, part);
        continue;
      }
      const int64_t batch = groups_ * frequencies_;
      dy = torch::stable::view(torch::stable::contiguous(permuted(conjugate(dy), {1, 3, 2, 0})),
                               Sizes{batch, block_, units});
      x = torch::stable::view(torch::stable::contiguous(permuted(x, {1, 3, 0, 2})),
                              Sizes{batch, units, channels_});
      const Tensor part = call("aten::bmm", "", dy, x);
      all = first == 0 ? part : sum(all, part);
    }
    if (!plan_.by_elements) {
      all = torch::stable::view(all, Sizes{groups_, frequencies_, block_, channels_});
      all = torch::stable::contiguous(permuted(all, {0, 2, 3, 1}));
    }
    const int64_t row = plan_.w.length, plane = plan_.h.length * row;
    const Tensor back = spectrum_back(
        torch::stable::view(all, Sizes{groups_ * block_ * channels_, plan_.h.length, row / 2 + 1}),
        plan_.h.length, row);
    const Tensor taps =
        blob(back.const_data_ptr(), {groups_, block_, channels_, shape_.r, shape_.s},
             {block_ * channels_ * plane, channels_ * plane, plane, shape_.dilation_h * row,
              shape_.dilation_w},
             real_);
    Tensor to = weights(problem_.w.data);
    torch::stable::copy_(to, taps);
    note(taps, 0);
  }

  // Takes down whether all results of a unit are finite (a sum of finite numbers that overflows
  // costs a second run). Only where that can be asked without waiting for a device.
  void note([[maybe_unused]] const Tensor& results, [[maybe_unused]] int64_t unit) {
#ifndef BRAZE_CUDA
    if (plan_.again == kAnyKernel) return;
    const Tensor all = call("aten::sum", "", results, std::optional<ScalarType>());
    const bool is_finite = real_ == ScalarType::Double
                               ? std::isfinite(*static_cast<const double*>(all.const_data_ptr()))
                               : std::isfinite(*static_cast<const float*>(all.const_data_ptr()));
    if (is_finite) return;
    spoilt_.resize(shape_.n * plan_.h.tiles * plan_.w.tiles);
    spoilt_[unit] = 1;
#endif
  }

  // Does spoilt tiles again directly, of a weight gradient all.
  void repair() {
    for (size_t i = 0; i < spoilt_.size(); ++i) {
      if (!spoilt_[i]) continue;
      const Conv2dProblem part = part_of(i);
      const Conv2dPlan plan = dev::plan_conv2d(part, plan_.again);
      const Workspace workspace(plan.workspace_bytes, like_);
      dev::run_conv2d(stream_, part, plan, bias_, nullptr, workspace.data());
    }
  }

  // A unit as a convolution of its own: all that it reads, of the result its tile.
  Conv2dProblem part_of(int64_t i) const {
    Conv2dProblem part = problem_;
    if (problem_.pass == Conv2dPass::kWgrad) return part;
    Conv2dShape& s = part.shape;
    const Unit at = unit(i);
    s.n = 1;
    const auto move = [&](Tensor4dRef& t, int64_t h, int64_t w) {
      t.data = shifted(t.data, at.image * t.n + h * t.h + w * t.w, type_);
    };
    if (problem_.pass == Conv2dPass::kDgrad) {
      move(part.x, at.h, at.w), move(part.y, 0, 0);
      s.h = std::min(plan_.h.step, s.h - at.h), s.w = std::min(plan_.w.step, s.w - at.w);
      s.pad_h += at.h, s.pad_w += at.w;
      return part;
    }
    const Range h = result_range(at.h, plan_.h.step, s.p, s.stride_h);
    const Range w = result_range(at.w, plan_.w.step, s.q, s.stride_w);
    move(part.y, h.first, w.first);
    s.p = h.count, s.q = w.count;
    const int64_t from_h = std::max<int64_t>(at.h - s.pad_h, 0);
    const int64_t from_w = std::max<int64_t>(at.w - s.pad_w, 0);
    move(part.x, from_h, from_w);
    s.pad_h -= at.h - from_h, s.pad_w -= at.w - from_w;
    s.h -= from_h, s.w -= from_w;
    return part;
  }

  Stream stream_;
  const Conv2dProblem& problem_;
  const Conv2dShape& shape_;
  const FftPlan& plan_;
  const FftExtents rows_, columns_;
  const Tensor& like_;
  const void* bias_;
  const int64_t channels_, filters_;  // of a group
  const int64_t frequencies_;
  ScalarType type_, real_;  // of the tensors, and what is computed in
  int64_t group_ = 0, groups_ = 0, filter_ = 0, block_ = 0;  // at work: first and count
  std::vector<char> spoilt_;                                 // units
};

}  // namespace

void run_conv2d_by_fft(Stream stream, const Conv2dProblem& problem, const Conv2dPlan& plan,
                       const void* bias, const Tensor& like) {
  ByFft(stream, problem, plan.tiling.get<FftPlan>(), bias, like).run();
}

}  // namespace braze
