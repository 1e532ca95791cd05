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
#include "launchers/transpose.h"
#include "ops/backend.h"
#include "ops/torch_call.h"

#ifdef BRAZE_CUDA
#include "libraries/loader.h"
#endif

namespace braze {
namespace {

using Sizes = std::vector<int64_t>;

// One of torch's own ops with one result.
template <typename... Args>
Tensor call(const char* op, const char* overload, const Args&... args) {
  return call_torch<1>(op, overload, args...)[0];
}

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
        frequencies_(plan.h.length * (plan.w.length / 2 + 1)),
        channel_block_(channels_),
        filter_block_(filters_) {
    type_ = like.scalar_type();
    real_ = type_ == ScalarType::Double ? type_ : ScalarType::Float;
  }

  void run() {
    const int64_t units = shape_.n * plan_.h.tiles * plan_.w.tiles;
    const bool is_dgrad = problem_.pass == Conv2dPass::kDgrad;
    const int64_t results = is_dgrad ? channels_ : filters_;
    for (group_ = 0; group_ < shape_.groups; group_ += plan_.groups) {
      groups_ = std::min(plan_.groups, shape_.groups - group_);
      for (int64_t first = 0; first < results; first += plan_.results) {
        const int64_t block = std::min(plan_.results, results - first);
        (is_dgrad ? channel_ : filter_) = first;
        (is_dgrad ? channel_block_ : filter_block_) = block;
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
    return of_x ? group_ * channels_ + channel_ : group_ * filters_ + filter_;
  }
  int64_t count(bool of_x) const { return of_x ? channel_block_ : filter_block_; }  // of a group

  // The tiles of a unit (of all, where images are of one tile each: then that is one copy), in
  // memory of tiles of `channels` a group: [groups, units, channels, rows, columns]. h, w: which
  // elements of a tile, `step` apart.
  Tensor in_tiles(const Tensor& memory, int64_t channels, int64_t units, int64_t i, int64_t images,
                  const Range& h, const Range& w, int64_t step_h, int64_t step_w) const {
    const int64_t row = plan_.w.length, plane = plan_.h.length * row;
    return blob(shifted(memory.const_data_ptr(), i * channels * plane + h.at * row + w.at, real_),
                {groups_, images, channels, h.count, w.count},
                {units * channels * plane, channels * plane, plane, step_h * row, step_w}, real_);
  }

  // The same part of x or y.
  Tensor in_images(bool of_x, int64_t image, int64_t images, const Range& h, const Range& w) const {
    const Tensor4dRef& t = ref(of_x);
    const int64_t at = image * t.n + first_channel(of_x) * t.c + h.first * t.h + w.first * t.w;
    return blob(shifted(t.data, at, type_), {groups_, images, count(of_x), h.count, w.count},
                {(of_x ? channels_ : filters_) * t.c, t.n, t.c, t.h, t.w}, type_);
  }

  int64_t images_at_once(int64_t units) const {
    return plan_.h.tiles * plan_.w.tiles == 1 ? units : 1;
  }

  // Tiles of x or of y, with zeros around: [groups, units, channels of a group, length, length].
  // stride, lead: of that tensor on the grid. limit_h, limit_w: how much of a tile may be filled.
  Tensor tiles(bool of_x, int64_t first, int64_t units, int64_t stride_h, int64_t stride_w,
               int64_t lead_h, int64_t lead_w, int64_t limit_h, int64_t limit_w) const {
    const int64_t channels = count(of_x);
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
    const Sizes sizes{groups_, units, channels, plan_.h.length, plan_.w.length};
    const Tensor all = is_full ? empty(sizes, like_, real_) : zeros(sizes, like_, real_);
    const int64_t images = images_at_once(units);
    for (int64_t i = 0; i < units; i += images) {
      const auto& [rows, columns] = ranges[i];
      if (rows.count == 0 || columns.count == 0) continue;
      Tensor to = in_tiles(all, channels, units, i, images, rows, columns, stride_h, stride_w);
      torch::stable::copy_(to, in_images(of_x, unit(first + i).image, images, rows, columns));
    }
    return all;
  }

  // Spectra of tiles: [groups, units, channels of a group, frequencies].
  Tensor spectra(bool of_x, const Tensor& tiles) const {
    return torch::stable::view(spectrum(tiles),
                               Sizes{groups_, tiles.size(1), count(of_x), frequencies_});
  }

  // [groups, rows, columns] to [groups, columns, rows].
  Tensor transposed(const Tensor& t, int64_t rows, int64_t columns) const {
    if (real_ == ScalarType::Double) {
      return torch::stable::contiguous(
          torch::stable::transpose(torch::stable::view(t, Sizes{groups_, rows, columns}), 1, 2));
    }
    const Tensor result = empty({groups_, columns, rows}, t);
    // A pair of float32 as a double.
    dev::transpose_copy(stream_, DType::kFloat64, t.const_data_ptr(), result.mutable_data_ptr(),
                        groups_, rows, columns);
    return result;
  }

  // Spectra [groups, a, b, frequencies] as matrices of a rows and b columns, one for each
  // frequency.
  Tensor matrices(const Tensor& t, int64_t a, int64_t b) const {
    return torch::stable::view(transposed(t, a * b, frequencies_),
                               Sizes{groups_ * frequencies_, a, b});
  }
  Tensor spectra_of(const Tensor& matrices) const {
    return transposed(matrices, frequencies_, matrices.size(1) * matrices.size(2));
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
    const int64_t first = (group_ * filters_ + filter_) * w.n + channel_ * w.c;
    return blob(shifted(data, first, type_),
                {groups_, filter_block_, channel_block_, shape_.r, shape_.s},
                {filters_ * w.n, w.n, w.c, w.h, w.w}, type_);
  }

  // The taps of filters that were padded to transforms: [groups, filters, channels, r, s].
  Tensor in_filters(const Tensor& memory) const {
    const int64_t row = plan_.w.length, plane = plan_.h.length * row;
    return blob(memory.const_data_ptr(),
                {groups_, filter_block_, channel_block_, shape_.r, shape_.s},
                {filter_block_ * channel_block_ * plane, channel_block_ * plane, plane,
                 shape_.dilation_h * row, shape_.dilation_w},
                real_);
  }

  // Conjugate spectra of the filters: [groups, filters, channels, frequencies].
  Tensor filter_spectra() const {
    const Tensor padded = zeros(
        {groups_, filter_block_, channel_block_, plan_.h.length, plan_.w.length}, like_, real_);
    Tensor taps = in_filters(padded);
    const Tensor given = weights(problem_.w.data);
    const bool turned = problem_.pass == Conv2dPass::kDgrad;
    torch::stable::copy_(taps, turned ? call("aten::flip", "", given, Sizes{3, 4}) : given);
    return torch::stable::view(call("aten::conj_physical_", "", spectrum(padded)),
                               Sizes{groups_, filter_block_, channel_block_, frequencies_});
  }

  // fprop and dgrad.
  void convolve(int64_t all_units) {
    const bool is_dgrad = problem_.pass == Conv2dPass::kDgrad;
    const int64_t results = count(is_dgrad);
    Tensor w = filter_spectra();
    if (!plan_.by_elements) {
      w = matrices(w, filter_block_, channel_block_);
      if (!is_dgrad) w = torch::stable::transpose(w, 1, 2);
    }
    for (int64_t first = 0; first < all_units; first += plan_.units) {
      const int64_t units = std::min(plan_.units, all_units - first);
      const Tensor product = torch::stable::view(
          plan_.by_elements ? by_elements(source_spectra(first, units), w)
                            : by_matrices(source_spectra(first, units), w),
          Sizes{groups_ * units * results, plan_.h.length, plan_.w.length / 2 + 1});
      store(spectrum_back(product, plan_.h.length, plan_.w.length), first, units);
    }
  }

  // x: [groups, units, terms, frequencies], w: [groups, filters, channels, frequencies]; the
  // result: [groups, units, results, frequencies].
  Tensor by_elements(const Tensor& x, const Tensor& w) const {
    const int64_t terms = x.size(2), dim = problem_.pass == Conv2dPass::kDgrad ? 1 : 2;
    Tensor all;
    for (int64_t i = 0; i < terms; ++i) {
      const Tensor from = terms > 1 ? call("aten::narrow", "", x, int64_t{2}, i, int64_t{1}) : x;
      const Tensor term =
          product(from, torch::stable::unsqueeze(torch::stable::select(w, dim, i), 1));
      all = i == 0 ? term : sum(all, term);
    }
    return all;
  }

  // The same, w: a matrix of terms x results for each frequency of each group.
  Tensor by_matrices(const Tensor& x, const Tensor& w) const {
    return spectra_of(call("aten::bmm", "", matrices(x, x.size(1), x.size(2)), w));
  }

#ifdef BRAZE_CUDA
  // What came back to where it belongs, finite or done again.
  void store(const Tensor& back, int64_t first, int64_t units) const {
    const bool of_x = problem_.pass == Conv2dPass::kDgrad;
    dev::store_fft_results(stream_, problem_, plan_,
                           {group_, groups_, of_x ? channel_ : filter_, count(of_x), first, units},
                           back.const_data_ptr(), bias_);
  }
  void store_weights(const Tensor& back) const { store(back, 0, 1); }
  void repair() const {}
#else
  static Range result_range(int64_t from, int64_t step, int64_t extent, int64_t stride) {
    const int64_t first = from / stride;
    return {first, std::min(extent - first, step / stride), 0};
  }

  // What came back, cropped, with the bias, to where it belongs.
  void store(const Tensor& back, int64_t first, int64_t units) {
    const bool of_x = problem_.pass == Conv2dPass::kDgrad;
    const int64_t channels = count(of_x), images = images_at_once(units);
    std::optional<Tensor> bias;
    if (bias_) {
      bias = blob(shifted(bias_, first_channel(of_x), type_), {groups_, 1, channels, 1, 1},
                  {of_x ? channels_ : filters_, 0, 1, 0, 0}, type_);
    }
    for (int64_t i = 0; i < units; i += images) {
      const Unit at = unit(first + i);
      const Range h =
          result_range(at.h, plan_.h.step, of_x ? shape_.h : shape_.p, rows_.result_stride);
      const Range w =
          result_range(at.w, plan_.w.step, of_x ? shape_.w : shape_.q, columns_.result_stride);
      const Tensor from = in_tiles(back, channels, units, i, images, h, w, rows_.result_stride,
                                   columns_.result_stride);
      Tensor to = in_images(of_x, at.image, images, h, w);
      torch::stable::copy_(to, bias ? sum(from, *bias) : from);
      for (int64_t image = 0; image < images; ++image) {
        note(images > 1 ? torch::stable::select(from, 1, image) : from, first + i + image);
      }
    }
  }

  void store_weights(const Tensor& back) {
    const Tensor taps = in_filters(back);
    Tensor to = weights(problem_.w.data);
    torch::stable::copy_(to, taps);
    note(taps, 0);
  }

  // Takes down whether all results of a unit are finite (a sum of finite numbers that overflows
  // costs a second run).
  void note(const Tensor& results, int64_t unit) {
    const Tensor all = call("aten::sum", "", results, std::optional<ScalarType>());
    const bool is_finite = real_ == ScalarType::Double
                               ? std::isfinite(*static_cast<const double*>(all.const_data_ptr()))
                               : std::isfinite(*static_cast<const float*>(all.const_data_ptr()));
    if (is_finite) return;
    spoilt_.resize(shape_.n * plan_.h.tiles * plan_.w.tiles);
    spoilt_[unit] = 1;
  }

  // Does spoilt tiles again directly, of a weight gradient all.
  void repair() {
    for (size_t i = 0; i < spoilt_.size(); ++i) {
      if (!spoilt_[i]) continue;
      const Conv2dProblem part = part_of(i);
      const Conv2dPlan plan = dev::plan_conv2d(part, plan_.again);
      const Workspace workspace(plan.workspace_bytes, like_);
      dev::run_conv2d(stream_, part, plan, {bias_}, workspace.data());
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

  std::vector<char> spoilt_;  // units
#endif

  void weight_gradient(int64_t all_units) {
    Tensor all;
    const FftExtents &h = rows_, &w = columns_;
    for (int64_t first = 0; first < all_units; first += plan_.units) {
      const int64_t units = std::min(plan_.units, all_units - first);
      const Tensor dy =
          call("aten::conj_physical_", "",
               spectra(false, tiles(false, first, units, h.result_stride, w.result_stride, 0, 0,
                                    plan_.h.step, plan_.w.step)));
      const Tensor x = spectra(
          true, tiles(true, first, units, 1, 1, h.lead, w.lead, plan_.h.length, plan_.w.length));
      Tensor part;
      if (plan_.by_elements) {
        part = product(torch::stable::unsqueeze(dy, 3), torch::stable::unsqueeze(x, 2));
        part = units == 1 ? torch::stable::select(part, 1, 0)
                          : call("aten::sum", "dim_IntList", part, std::optional<Sizes>(Sizes{1}),
                                 false, std::optional<ScalarType>());
      } else {
        part = call("aten::bmm", "",
                    torch::stable::transpose(matrices(dy, units, filter_block_), 1, 2),
                    matrices(x, units, channel_block_));
      }
      all = first == 0 ? part : sum(all, part);
    }
    if (!plan_.by_elements) all = spectra_of(all);
    const int64_t row = plan_.w.length;
    const Tensor back = spectrum_back(
        torch::stable::view(
            all, Sizes{groups_ * filter_block_ * channel_block_, plan_.h.length, row / 2 + 1}),
        plan_.h.length, row);
    store_weights(back);
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
  ScalarType type_, real_;               // of the tensors, and what is computed in
  int64_t group_ = 0, groups_ = 0;       // at work: first and count
  int64_t channel_ = 0, channel_block_;  // the same, of each group's channels
  int64_t filter_ = 0, filter_block_;    // and filters
};

}  // namespace

void run_conv2d_by_fft(Stream stream, const Conv2dProblem& problem, const Conv2dPlan& plan,
                       const void* bias, const Tensor& like) {
#ifdef BRAZE_CUDA
  const vendor::AllowSetupInCapture allow;  // torch may have to make plans of cuFFT's
#endif
  ByFft(stream, problem, plan.tiling.get<FftPlan>(), bias, like).run();
}

}  // namespace braze
