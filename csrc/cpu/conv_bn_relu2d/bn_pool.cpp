// conv_bn_relu2d.h on the CPU. In NHWC loops go over the channels of one window. In NCHW rows may
// be short: loops go over the windows of a band, pairs of rows of one plane, found by a table of
// their corners.
#include "launchers/conv_bn_relu2d.h"

#include <algorithm>
#include <vector>

#include "cpu/batch_norm/batch_norm_parts.h"
#include "cpu/common/transpose_matrix.h"
#include "cpu/conv_bn_relu2d/bn_pool_codes.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int kStopped = 4;              // the code where ReLU stops the gradient
constexpr int64_t kBandElements = 4096;  // of z, at most, where that is a pair of rows or more

constexpr int64_t kPad = 16;  // elements of the widest vector

// Max and ReLU of normalised values at the four positions. Torch's rules: the first of equals wins,
// NaN beats every number. (One choice after the other: the pass takes a seventh longer with nested
// ones, on a Zen 5.)
template <typename A, typename Code>
inline A pool_window(A v0, A v1, A v2, A v3, Code* code) {
  A best = v0;
  int position = 0;
  const auto consider = [&](A v, int at) {
    const bool wins = (v > best) | (v != v);
    best = wins ? v : best;
    position = wins ? at : position;
  };
  consider(v1, 1);
  consider(v2, 2);
  consider(v3, 3);
  const bool stopped = best <= A(0);
  *code = static_cast<Code>(stopped ? kStopped : position);
  return stopped ? A(0) : best;
}

// The coefficient of a run's j-th element: its own in NHWC, the channel's in NCHW.
struct Each {
  template <typename A>
  A operator()(const A* k, int64_t j) const {
    return k[j];
  }
};
struct Same {
  int64_t channel;
  template <typename A>
  A operator()(const A* k, int64_t) const {
    return k[channel];
  }
};

// to = (from - mean) * scale + shift, of `count` adjacent elements.
template <typename T, typename At>
void normalize_run(int64_t count, const T* from, const acc_t<T>* mean, const acc_t<T>* scale,
                   const acc_t<T>* shift, const At& at, acc_t<T>* to) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    to[j] = (static_cast<acc_t<T>>(from[j]) - at(mean, j)) * at(scale, j) + at(shift, j);
  }
}

// dz of `count` adjacent elements with gradients `grads`, scaled already.
template <bool kTraining, typename T, typename At>
void input_grad_run(int64_t count, const acc_t<T>* grads, const T* z, const acc_t<T>* mean,
                    const GradCoefficients<acc_t<T>>& k, const At& at, T* dz) {
  using A = acc_t<T>;
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    if constexpr (kTraining) {
      dz[j] = static_cast<T>(grads[j] + (static_cast<A>(z[j]) - at(mean, j)) * at(k.by_input, j) +
                             at(k.offset, j));
    } else {
      dz[j] = static_cast<T>(grads[j]);
    }
  }
}

// How planes are cut into bands: `pairs` pairs of rows each, the last one of a plane what is left.
struct Bands {
  int64_t w, q, pairs, per_plane;
  int64_t rows, pooled_rows;     // of a plane
  std::vector<int32_t> corners;  // of a band's windows, from the band's first element on

  explicit Bands(const BnPoolShape& shape)
      : w(shape.w), q(shape.q()), rows(shape.h), pooled_rows(shape.p()) {
    const int64_t all = ceil_div(rows, 2);
    pairs = std::clamp<int64_t>(kBandElements / (2 * w), 1, all);
    per_plane = ceil_div(all, pairs);
    corners.resize(pairs * q);
    for (int64_t e = 0; e < pairs * q; ++e) {
      corners[e] = static_cast<int32_t>(e / q * 2 * w + e % q * 2);
    }
  }
  int64_t most_elements() const { return 2 * pairs * w; }

  // f(offset, elements, pooled offset, windows) of band i.
  template <typename F>
  void operator()(int64_t i, const F& f) const {
    const int64_t plane = i / per_plane, first = i % per_plane * pairs;
    const int64_t band_rows = std::min(2 * pairs, rows - 2 * first);
    const int64_t pooled = std::min(pairs, pooled_rows - first);
    f((plane * rows + 2 * first) * w, band_rows * w, (plane * pooled_rows + first) * q, pooled * q);
  }
  int64_t grain() const { return std::max<int64_t>(1, kGrain / most_elements()); }
};

template <typename T>
void pool_bands(const BnPoolShape& shape, const T* z, const acc_t<T>* mean, const acc_t<T>* scale,
                const acc_t<T>* shift, T* y, uint32_t* codes) {
  using A = acc_t<T>;
  const Bands bands(shape);
  const int64_t padded = ceil_div(shape.w, kPad) * kPad;  // whole vectors
  parallel_for(0, shape.n * shape.c * bands.per_plane, bands.grain(), [&](int64_t b, int64_t end) {
    const int64_t room = bands.most_elements() + 2 * kPad;
    std::vector<A> values(room), best(room);
    std::vector<int32_t> codes_at(room);  // of bytes a vector would be longer than most rows
    std::vector<uint8_t> picked(bands.corners.size());
    for (; b < end; ++b) {
      bands(b, [&](int64_t offset, int64_t elements, int64_t pooled, int64_t windows) {
        const Same at{b / bands.per_plane % shape.c};
        normalize_run(elements, z + offset, mean, scale, shift, at, values.data());
        // Windows at every element of a row, of which every other one counts: adjacent loads are
        // that much faster than others.
        A* result = best.data();
        int32_t* code = codes_at.data();
        for (int64_t row = 0; row + bands.w < elements; row += 2 * bands.w) {
          const A *v0 = values.data() + row, *v1 = v0 + 1, *v2 = v0 + bands.w, *v3 = v2 + 1;
#pragma omp simd
          for (int64_t i = 0; i < padded; ++i) {
            result[row + i] = pool_window(v0[i], v1[i], v2[i], v3[i], &code[row + i]);
          }
        }
        const int32_t* corners = bands.corners.data();
        T* out = y + pooled;
        uint8_t* codes_out = picked.data();
        for (int64_t e = 0; e < windows; ++e) {
          out[e] = static_cast<T>(result[corners[e]]);
          codes_out[e] = static_cast<uint8_t>(code[corners[e]]);
        }
        pack(picked.data(), pooled, windows, codes);
      });
    }
  });
}

// z's offset from a window's corner at the position that the code names (any, where stopped).
inline int32_t position_of(int code, int32_t w) { return (code & 1) + (code >> 1 & 1) * w; }

template <bool kTraining, typename T>
void spread_bands(const BnPoolShape& shape, const T* dy, const uint32_t* codes, const T* z,
                  const acc_t<T>* mean, const GradCoefficients<acc_t<T>>& k, T* dz) {
  using A = acc_t<T>;
  const Bands bands(shape);
  parallel_for(0, shape.n * shape.c * bands.per_plane, bands.grain(), [&](int64_t b, int64_t end) {
    std::vector<A> grads(bands.most_elements());
    std::vector<uint8_t> unpacked(bands.corners.size());
    for (; b < end; ++b) {
      bands(b, [&](int64_t offset, int64_t elements, int64_t pooled, int64_t windows) {
        const int64_t channel = b / bands.per_plane % shape.c;
        unpack(codes, pooled, windows, unpacked.data());
        std::fill_n(grads.data(), elements, A(0));
        for (int64_t e = 0; e < windows; ++e) {
          const int code = unpacked[e];
          const A grad = static_cast<A>(dy[pooled + e]) * k.by_grad[channel];
          // The corner itself where it was stopped: no branch to mispredict.
          grads[bands.corners[e] + position_of(code, static_cast<int32_t>(bands.w))] =
              code < kStopped ? grad : A(0);
        }
        input_grad_run<kTraining>(elements, grads.data(), z + offset, mean, k, Same{channel},
                                  dz + offset);
      });
    }
  });
}

// Sums over `count` windows of the band at z, the first one's gradient and code at dy and codes.
// grads, deviations: room for as many elements.
template <typename T>
void sums_of_band(const Bands& bands, const T* dy, const uint8_t* codes, const T* z, acc_t<T> mean,
                  int64_t count, acc_t<T>* grads, acc_t<T>* deviations, Partial* result) {
  using A = acc_t<T>;
  const int32_t* corners = bands.corners.data();
  const int32_t w = static_cast<int32_t>(bands.w);
  for (int64_t e = 0; e < count; ++e) {
    const bool passed = codes[e] < kStopped;
    grads[e] = passed ? static_cast<A>(dy[e]) : A(0);
    const A value = z[corners[e] + position_of(codes[e], w)];
    deviations[e] = passed ? value - mean : A(0);
  }
  A sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
  for (int64_t e = 0; e < count; ++e) {
    sum += grads[e];
    dot += grads[e] * deviations[e];
  }
  result->first += sum;
  result->second += dot;
}

// From one position of a window to the others, NHWC.
struct Steps {
  int64_t right, down;
  explicit Steps(const BnPoolShape& shape) : right(shape.c), down(shape.w * shape.c) {}
  int64_t operator()(int position) const { return position % 2 * right + position / 2 * down; }
};

// The codes of a window's channels, in integers as wide as float32: loops over both vectorise best.
void unpack_pixel(const uint32_t* words, int64_t first, int64_t c, uint8_t* bytes, int32_t* codes) {
  unpack(words, first, c, bytes);
#pragma omp simd
  for (int64_t j = 0; j < c; ++j) codes[j] = bytes[j];
}

// The window whose first position is at z.
template <typename T>
void pool_pixel(int64_t c, const T* z, const Steps& steps, const acc_t<T>* mean,
                const acc_t<T>* scale, const acc_t<T>* shift, T* y, int32_t* code) {
  const T *z1 = z + steps(1), *z2 = z + steps(2), *z3 = z + steps(3);
#pragma omp simd
  for (int64_t j = 0; j < c; ++j) {
    const auto normalized = [&](const T* from) {
      return (static_cast<acc_t<T>>(from[j]) - mean[j]) * scale[j] + shift[j];
    };
    y[j] = static_cast<T>(
        pool_window(normalized(z), normalized(z1), normalized(z2), normalized(z3), &code[j]));
  }
}

// Rows of pooled pixels that are worked on together, NHWC: one, or where the pooled tensor is
// turned as many as are transposed well.
struct PooledRows {
  int64_t c, p, q, together, per_image;

  explicit PooledRows(const BnPoolShape& shape) : c(shape.c), p(shape.p()), q(shape.q()) {
    constexpr int64_t kElements = 8192;
    together = shape.turned ? std::clamp<int64_t>(kElements / (q * c), 1, p) : 1;
    per_image = ceil_div(p, together);
  }
  int64_t elements() const { return together * q * c; }
  int64_t grain() const { return std::max<int64_t>(1, kGrain / (4 * elements())); }
  int64_t rows_from(int64_t first) const { return std::min(together, p - first); }
};

// Pixels of c channels each, to or from planes that lie `plane` apart.
template <typename T>
void to_planes(const T* pixels, int64_t count, int64_t c, T* planes, int64_t plane) {
  transpose_matrix(planes, plane, pixels, c, c, count);
}
template <typename T>
void from_planes(const T* planes, int64_t plane, int64_t count, int64_t c, T* pixels) {
  transpose_matrix(pixels, c, planes, plane, count, c);
}

template <typename T>
void pool_pixels(const BnPoolShape& shape, const T* z, const acc_t<T>* mean, const acc_t<T>* scale,
                 const acc_t<T>* shift, T* y, uint32_t* codes) {
  const Steps steps(shape);
  const PooledRows bands(shape);
  const int64_t c = shape.c, p = shape.p(), q = shape.q();
  parallel_for(0, shape.n * bands.per_image, bands.grain(), [&](int64_t band, int64_t end) {
    std::vector<uint8_t> row_codes(q * c);
    std::vector<int32_t> code(c);  // of bytes a vector would be longer than most pixels
    std::vector<T> results(shape.turned ? bands.elements() : 0);
    for (; band < end; ++band) {
      const int64_t image = band / bands.per_image;
      const int64_t first = band % bands.per_image * bands.together, rows = bands.rows_from(first);
      const int64_t first_pixel = (image * p + first) * q;
      T* const to = shape.turned ? results.data() : y + first_pixel * c;
      for (int64_t row = 0; row < rows; ++row) {
        const T* corner = z + (image * shape.h + 2 * (first + row)) * steps.down;
        for (int64_t column = 0; column < q; ++column, corner += 2 * c) {
          pool_pixel(c, corner, steps, mean, scale, shift, to + (row * q + column) * c,
                     code.data());
          uint8_t* bytes = row_codes.data() + column * c;
#pragma omp simd
          for (int64_t j = 0; j < c; ++j) bytes[j] = static_cast<uint8_t>(code[j]);
        }
        pack(row_codes.data(), (first_pixel + row * q) * c, q * c, codes);
      }
      if (shape.turned) {
        to_planes(to, rows * q, c, y + (image * c * p + first) * q, p * q);
      }
    }
  });
}

// dz at the four positions of a window.
template <bool kTraining, typename T>
void spread_window(int64_t c, const T* dy, const int32_t* codes, const T* z, const Steps& steps,
                   const acc_t<T>* mean, const GradCoefficients<acc_t<T>>& k, T* dz) {
  using A = acc_t<T>;
  const T *z1 = z + steps(1), *z2 = z + steps(2), *z3 = z + steps(3);
  T *dz1 = dz + steps(1), *dz2 = dz + steps(2), *dz3 = dz + steps(3);
  const A *by_grad = k.by_grad, *by_input = k.by_input, *offset = k.offset;
#pragma omp simd
  for (int64_t j = 0; j < c; ++j) {
    const A grad = static_cast<A>(dy[j]) * by_grad[j];
    const auto input_grad = [&](int position, const T* from) {
      const A passed = codes[j] == position ? grad : A(0);
      if constexpr (!kTraining) return static_cast<T>(passed);
      return static_cast<T>(passed + (static_cast<A>(from[j]) - mean[j]) * by_input[j] + offset[j]);
    };
    dz[j] = input_grad(0, z);
    dz1[j] = input_grad(1, z1);
    dz2[j] = input_grad(2, z2);
    dz3[j] = input_grad(3, z3);
  }
}

template <bool kTraining, typename T>
void spread_pixels(const BnPoolShape& shape, const T* dy, const uint32_t* codes, const T* z,
                   const acc_t<T>* mean, const GradCoefficients<acc_t<T>>& k, T* dz) {
  using A = acc_t<T>;
  const Steps steps(shape);
  const PooledRows bands(shape);
  const int64_t c = shape.c, p = shape.p(), q = shape.q();
  parallel_for(0, shape.n * bands.per_image, bands.grain(), [&](int64_t band, int64_t end) {
    std::vector<uint8_t> bytes(c);
    std::vector<int32_t> unpacked(c);
    std::vector<T> grads(shape.turned ? bands.elements() : 0);
    const std::vector<A> no_grads(c);
    // What is in no window: an odd extent's last row or column.
    const auto spread_nothing = [&](int64_t image, int64_t row, int64_t column) {
      const int64_t pixel = (image * shape.h + row) * steps.down + column * c;
      input_grad_run<kTraining>(c, no_grads.data(), z + pixel, mean, k, Each{}, dz + pixel);
    };
    for (; band < end; ++band) {
      const int64_t image = band / bands.per_image;
      const int64_t first = band % bands.per_image * bands.together, rows = bands.rows_from(first);
      const int64_t first_pixel = (image * p + first) * q;
      const T* from = dy + first_pixel * c;
      if (shape.turned) {
        from_planes(dy + (image * c * p + first) * q, p * q, rows * q, c, grads.data());
        from = grads.data();
      }
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t top = 2 * (first + row);
        for (int64_t column = 0; column < q; ++column) {
          const int64_t corner = (image * shape.h + top) * steps.down + 2 * column * c;
          const int64_t pixel = row * q + column;
          unpack_pixel(codes, (first_pixel + pixel) * c, c, bytes.data(), unpacked.data());
          spread_window<kTraining>(c, from + pixel * c, unpacked.data(), z + corner, steps, mean, k,
                                   dz + corner);
        }
        for (int i = 0; i < 2 && 2 * q < shape.w; ++i) spread_nothing(image, top + i, 2 * q);
      }
      if (first + rows < p || 2 * p == shape.h) continue;
      for (int64_t column = 0; column < shape.w; ++column) spread_nothing(image, 2 * p, column);
    }
  });
}

// Adds to sum and dot what the gradient dy of a window, with that code, and the values at its four
// positions give: g, and g * (value - mean) at the maximum. Of one channel, or of a vector of them.
template <typename A, typename Code>
inline void add_maximum(const A& dy, const Code& code, const A& v0, const A& v1, const A& v2,
                        const A& v3, const A& mean, A* sum, A* dot) {
  const A top = code == 1 ? v1 : v0, bottom = code == 3 ? v3 : v2;
  const A value = code < 2 ? top : bottom;
  const A g = code < kStopped ? dy : A{};
  *sum += g;
  *dot += g * (code < kStopped ? value - mean : A{});
}

// The same at the maximum of each channel's window. float32 in vectors by hand: the compiler makes
// branches and masked stores of the loop where there is no AVX-512.
template <typename T>
void add_window(int64_t c, const T* dy, const int32_t* codes, const T* z, const Steps& steps,
                const acc_t<T>* mean, acc_t<T>* sum, acc_t<T>* dot) {
  using A = acc_t<T>;
  const T *z1 = z + steps(1), *z2 = z + steps(2), *z3 = z + steps(3);
  int64_t first = 0;
  if constexpr (std::is_same_v<T, float>) {
    using V = vec_t<float>;
    using Codes = decltype(V{} == V{});
    constexpr int kL = kLanes<float>;
    for (; first + kL <= c; first += kL) {
      const auto at = [&](const float* from) { return load<V>(from + first); };
      V sums = at(sum), dots = at(dot);
      add_maximum(at(dy), load<Codes>(codes + first), at(z), at(z1), at(z2), at(z3), at(mean),
                  &sums, &dots);
      store(sum + first, sums), store(dot + first, dots);
    }
  }
#pragma omp simd
  for (int64_t j = first; j < c; ++j) {
    add_maximum(static_cast<A>(dy[j]), codes[j], static_cast<A>(z[j]), static_cast<A>(z1[j]),
                static_cast<A>(z2[j]), static_cast<A>(z3[j]), mean[j], &sum[j], &dot[j]);
  }
}

// `count` pixels from `first` on, of images of `plane` pixels each, contiguous.
template <typename T>
const T* gather_pixels(const T* images, int64_t first, int64_t count, int64_t c, int64_t plane,
                       T* pixels) {
  for (int64_t i = 0; i < count;) {
    const int64_t image = (first + i) / plane, pixel = (first + i) % plane;
    const int64_t together = std::min(count - i, plane - pixel);
    from_planes(images + image * c * plane + pixel, plane, together, c, pixels + i * c);
    i += together;
  }
  return pixels;
}

// Fills partials with the sums of g and of g * (z - mean) at the maxima.
template <typename T>
void pooled_sums(const BnPoolShape& shape, const BatchNormShape& pooled, const T* dy, const T* z,
                 const uint32_t* codes, const acc_t<T>* mean, Partial* partials) {
  using A = acc_t<T>;
  const int64_t c = shape.c, p = shape.p(), q = shape.q();
  const Bands bands(shape);
  const Steps steps(shape);
  reduce(
      pooled, partials,
      [&](int64_t offset, int64_t channel, Partial* result) {
        std::vector<uint8_t> unpacked(bands.corners.size());
        std::vector<A> grads(bands.corners.size()), deviations(grads.size());
        const int64_t plane = offset / pooled.inner;
        for (int64_t b = plane * bands.per_plane; b < (plane + 1) * bands.per_plane; ++b) {
          bands(b, [&](int64_t from, int64_t, int64_t first, int64_t windows) {
            unpack(codes, first, windows, unpacked.data());
            sums_of_band(bands, dy + first, unpacked.data(), z + from, mean[channel], windows,
                         grads.data(), deviations.data(), result);
          });
        }
      },
      [&](int64_t offset, int64_t pixels, Partial* results) {
        std::vector<uint8_t> bytes(c);
        std::vector<int32_t> unpacked(c);
        std::vector<A> sum(c), dot(c);
        std::vector<T> turned(shape.turned ? kRowBlock * c : 0);
        // The next pixel's row among all images' and its column.
        int64_t row = offset / c / q, column = offset / c % q;
        for (int64_t begin = 0; begin < pixels; begin += kRowBlock) {
          std::fill(sum.begin(), sum.end(), A(0));
          std::fill(dot.begin(), dot.end(), A(0));
          const int64_t count = std::min(kRowBlock, pixels - begin), first = offset / c + begin;
          const T* grads = dy + first * c;
          if (shape.turned) grads = gather_pixels(dy, first, count, c, p * q, turned.data());
          for (int64_t i = 0; i < count; ++i) {
            unpack_pixel(codes, (first + i) * c, c, bytes.data(), unpacked.data());
            const T* corner = z + (row / p * shape.h + 2 * (row % p)) * steps.down + 2 * column * c;
            add_window(c, grads + i * c, unpacked.data(), corner, steps, mean, sum.data(),
                       dot.data());
            if (++column == q) column = 0, ++row;
          }
          for (int64_t j = 0; j < c; ++j) {
            results[j].first += sum[j];
            results[j].second += dot[j];
          }
        }
      });
}

BatchNormShape pooled_norm(const BnPoolShape& shape) {
  return {shape.dtype, shape.n, shape.c, shape.p() * shape.q(), shape.channels_last};
}

const KernelEntry kEntry({"bn_relu2d", "bn_pool", "float64 float32 bfloat16 float16", "cpu", true,
                          "normalises and pools in one pass; 4-bit codes for the backward pass"});

}  // namespace

bool bn_pool_turns(const BnPoolShape& shape) { return shape.channels_last; }

void bn_pool_forward(Stream, const BnPoolShape& shape, const void* z,
                     const BatchNormStatistics& statistics, void* y, uint32_t* codes) {
  std::fill_n(codes, bn_pool_code_words(shape), 0u);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const auto pool = shape.channels_last ? pool_pixels<T> : pool_bands<T>;
    pool(shape, static_cast<const T*>(z), static_cast<const A*>(statistics.mean),
         static_cast<const A*>(statistics.scale), static_cast<const A*>(statistics.shift),
         static_cast<T*>(y), codes);
  });
}

void bn_pool_backward(Stream, const BnPoolShape& shape, bool training, const void* dy,
                      const void* z, const uint32_t* codes, const BatchNormAffine& affine,
                      const BatchNormStatistics& statistics, void* dz, void* dweight, void* dbias,
                      void* dconstant, void* workspace) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* grad = static_cast<const T*>(dy);
    const T* in = static_cast<const T*>(z);
    const A* m = static_cast<const A*>(statistics.mean);
    T* out = static_cast<T*>(dz);
    const BatchNormShape pooled = pooled_norm(shape);
    const int64_t splits = split_count(pooled);
    auto* partials = static_cast<Partial*>(workspace);
    const GradCoefficients<A> k(partials + splits * shape.c, shape.c);
    const bool with_sums = dweight || dbias || dconstant || (dz && training);
    if (with_sums) pooled_sums(shape, pooled, grad, in, codes, m, partials);
    const GradResults results{affine, dweight, dbias, dconstant, shape.dtype, training};
    merge_grads(shape.c, shape.norm().count(), partials, with_sums ? splits : 0,
                static_cast<const A*>(statistics.rstd), results, k);
    if (!dz) return;
    const auto spread = shape.channels_last
                            ? (training ? spread_pixels<true, T> : spread_pixels<false, T>)
                            : (training ? spread_bands<true, T> : spread_bands<false, T>);
    spread(shape, grad, codes, in, m, k, out);
  });
}

}  // namespace braze::cpu
