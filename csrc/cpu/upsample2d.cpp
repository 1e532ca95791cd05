// Nearest and bilinear upsampling: rows first, then columns, of one row of results or of gradients
// at a time. Backward gathers, so that sums are bitwise repeatable.
#include "launchers/upsample2d.h"

#include <algorithm>
#include <vector>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrain = 8192;  // elements of a task

const KernelEntry kEntry({"upsample2d", "rows", "float64 float32 bfloat16 float16", "cpu", true,
                          "threaded over rows, vectorised along them or along channels"});

// f(input tag, result tag, rows, columns) for the pairs of dtypes that exist.
template <typename F>
void dispatch_types(const Upsample2dShape& shape, const F& f) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto with_places = [&](auto place) {
      using P = typename decltype(place)::type;
      const auto rows = shape.rows<P>(), columns = shape.columns<P>();
      if constexpr (sizeof(T) == 2) {
        if (shape.result == DType::kFloat32) return f(tag, TypeTag<float>{}, rows, columns);
      }
      f(tag, tag, rows, columns);
    };
    if constexpr (std::is_same_v<T, double>) {
      if (shape.is_bilinear()) return with_places(TypeTag<double>{});
    }
    with_places(TypeTag<float>{});
  });
}

template <typename P>
std::vector<typename UpsampleAxis<P>::Source> sources_of(const UpsampleAxis<P>& axis) {
  std::vector<typename UpsampleAxis<P>::Source> sources(axis.out);
  for (int i = 0; i < axis.out; ++i) sources[i] = axis.source_of(i);
  return sources;
}

// What each input element is part of along an axis: results from `begin` on, and its shares of
// them.
template <typename P>
struct Parts {
  struct Range {
    int begin, end, shares;
  };
  std::vector<Range> ranges;
  std::vector<P> shares;

  explicit Parts(const UpsampleAxis<P>& axis) {
    for (int at = 0; at < axis.in; ++at) {
      const int begin = axis.begin_of(at), end = axis.end_of(at);
      ranges.push_back({begin, end, static_cast<int>(shares.size())});
      for (int i = begin; i < end; ++i) shares.push_back(axis.share_of(at, i));
    }
  }
};

// f(first, last) for parts of all lines, which have so many elements.
template <typename F>
void for_lines(int64_t lines, int64_t elements, const F& f) {
  parallel_for(0, lines, std::max<int64_t>(1, kGrain / elements), f);
}

template <typename T, typename Out, typename P>
void forward(const Upsample2dShape& shape, const UpsampleAxis<P>& rows,
             const UpsampleAxis<P>& columns, const T* x, Out* y) {
  using A = acc_t<T>;
  const int64_t depth = shape.depth(), of_input = shape.w * depth, of_result = shape.q * depth;
  const auto sources = sources_of(columns);
  for_lines(shape.images() * shape.p, of_result, [&](int64_t first, int64_t last) {
    std::vector<A> blend(of_input);
    for (int64_t line = first; line < last; ++line) {
      const auto row = rows.source_of(static_cast<int>(line % shape.p));
      const T* const image = x + line / shape.p * shape.h * of_input;
      const T* const upper = image + row.first * of_input;
      const T* const lower = image + row.second * of_input;
      Out* const to = y + line * of_result;
      if (!shape.is_bilinear()) {
        for (int64_t q = 0; q < shape.q; ++q) {
          const T* const from = upper + sources[q].first * depth;
          for (int64_t k = 0; k < depth; ++k) to[q * depth + k] = Out(static_cast<A>(from[k]));
        }
        continue;
      }
      const A by_lower = row.weight, by_upper = 1 - by_lower;
      for (int64_t j = 0; j < of_input; ++j) {
        blend[j] = by_upper * static_cast<A>(upper[j]) + by_lower * static_cast<A>(lower[j]);
      }
      for (int64_t q = 0; q < shape.q; ++q) {
        const auto& source = sources[q];
        const A* const left = blend.data() + source.first * depth;
        const A* const right = blend.data() + source.second * depth;
        const A by_right = source.weight, by_left = 1 - by_right;
        for (int64_t k = 0; k < depth; ++k) {
          to[q * depth + k] = Out(by_left * left[k] + by_right * right[k]);
        }
      }
    }
  });
}

template <typename T, typename Out, typename P>
void backward(const Upsample2dShape& shape, const UpsampleAxis<P>& rows,
              const UpsampleAxis<P>& columns, const Out* dy, T* dx) {
  using A = acc_t<T>;
  const int64_t depth = shape.depth(), of_input = shape.w * depth, of_result = shape.q * depth;
  const Parts<P> of_rows(rows), of_columns(columns);
  for_lines(shape.images() * shape.h, of_input, [&](int64_t first, int64_t last) {
    std::vector<A> sums(of_result), sum(depth);
    for (int64_t line = first; line < last; ++line) {
      const auto& range = of_rows.ranges[line % shape.h];
      const Out* const image = dy + line / shape.h * shape.p * of_result;
      std::fill(sums.begin(), sums.end(), A(0));
      for (int p = range.begin; p < range.end; ++p) {
        const A share = static_cast<A>(of_rows.shares[range.shares + p - range.begin]);
        const Out* const from = image + p * of_result;
        for (int64_t j = 0; j < of_result; ++j) sums[j] += share * static_cast<A>(from[j]);
      }
      T* const to = dx + line * of_input;
      for (int64_t w = 0; w < shape.w; ++w) {
        const auto& part = of_columns.ranges[w];
        std::fill(sum.begin(), sum.end(), A(0));
        for (int q = part.begin; q < part.end; ++q) {
          const A share = static_cast<A>(of_columns.shares[part.shares + q - part.begin]);
          for (int64_t k = 0; k < depth; ++k) sum[k] += share * sums[q * depth + k];
        }
        for (int64_t k = 0; k < depth; ++k) to[w * depth + k] = T(sum[k]);
      }
    }
  });
}

}  // namespace

void upsample2d(Stream, const Upsample2dShape& shape, const void* x, void* y) {
  if (shape.output_count() == 0) return;
  dispatch_types(shape, [&](auto tag, auto result, const auto& rows, const auto& columns) {
    using T = typename decltype(tag)::type;
    using Out = typename decltype(result)::type;
    forward(shape, rows, columns, static_cast<const T*>(x), static_cast<Out*>(y));
  });
}

void upsample2d_backward(Stream, const Upsample2dShape& shape, const void* dy, void* dx) {
  if (shape.input_count() == 0) return;
  dispatch_types(shape, [&](auto tag, auto result, const auto& rows, const auto& columns) {
    using T = typename decltype(tag)::type;
    using Out = typename decltype(result)::type;
    backward(shape, rows, columns, static_cast<const Out*>(dy), static_cast<T*>(dx));
  });
}

}  // namespace braze::cpu
