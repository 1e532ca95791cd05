// bn_pool.h on the CPU. A run is what loops go over: the windows of a row of one plane in NCHW, the
// channels of one window in NHWC.
#include "kernels/fused/bn_pool.h"

#include <algorithm>
#include <vector>

#include "cpu/batch_norm_parts.h"
#include "kernels/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int kStopped = 4;  // the code where ReLU stops the gradient

// Codes of elements [first, first + count), one to a byte, into words that were zero. Other threads
// may write the other codes of the first and the last word.
void pack(const uint8_t* codes, int64_t first, int64_t count, uint32_t* words) {
  for (int64_t i = 0; i < count;) {
    const int64_t e = first + i, in_word = std::min(8 - e % 8, count - i);
    uint32_t word = 0;
    for (int64_t j = 0; j < in_word; ++j) word |= uint32_t{codes[i + j]} << (4 * (e % 8 + j));
    if (in_word == 8) {
      words[e / 8] = word;
    } else {
      __atomic_fetch_or(&words[e / 8], word, __ATOMIC_RELAXED);
    }
    i += in_word;
  }
}

void unpack(const uint32_t* words, int64_t first, int64_t count, uint8_t* codes) {
  const auto code = [&](uint64_t e) {
    return static_cast<uint8_t>(words[e / 8] >> (4 * (e % 8)) & 7);
  };
  int64_t i = 0;
  for (; i < count && (first + i) % 8 != 0; ++i) codes[i] = code(first + i);
  for (; i + 8 <= count; i += 8) {
    const uint32_t word = words[(first + i) / 8];
#pragma omp simd
    for (int j = 0; j < 8; ++j) codes[i + j] = static_cast<uint8_t>(word >> (4 * j) & 7);
  }
  for (; i < count; ++i) codes[i] = code(first + i);
}

// Where the elements of a run's windows are: element `j` of the run at position 0 to 3.
struct Run {
  int64_t step;      // from one element of the run to the next
  int64_t position;  // from position 0 to 1
  int64_t row;       // from position 0 to 2

  static Run of(const BnPoolShape& shape) {
    return shape.channels_last ? Run{1, shape.c, shape.w * shape.c} : Run{2, 1, shape.w};
  }
};

// From position 0 to 1 with that step: a constant where loads of neighbours can be one.
template <int64_t kStep>
int64_t to_the_right(const Run& run) {
  return kStep == 2 ? 1 : run.position;
}

// Calls f(step) with the run's step as a compile-time constant: loops over it vectorise.
template <typename F>
void with_step(const Run& run, const F& f) {
  if (run.step == 1) {
    f(std::integral_constant<int64_t, 1>{});
  } else {
    f(std::integral_constant<int64_t, 2>{});
  }
}

// at(coefficients, j) is that of a run's j-th element; the same one throughout in NCHW.
template <typename F>
void with_coefficients(const BnPoolShape& shape, int64_t channel, const F& f) {
  if (shape.channels_last) {
    f([](const auto* k, int64_t j) { return k[j]; });
  } else {
    f([channel](const auto* k, int64_t) { return k[channel]; });
  }
}

// One run of the forward pass: y and codes of `count` windows, the first at z. v: room for a run's
// elements at each position; loops over one stream at a time are what compilers vectorise.
template <int64_t kStep, typename T, typename At>
void pool_run(const Run& run, int64_t count, const T* z, const acc_t<T>* mean,
              const acc_t<T>* scale, const acc_t<T>* shift, const At& at,
              std::vector<acc_t<T>> (&v)[4], T* y, uint8_t* codes) {
  using A = acc_t<T>;
  const int64_t right = to_the_right<kStep>(run);
  const int64_t positions[4] = {0, right, run.row, run.row + right};
  for (int i = 0; i < 4; ++i) {
    const T* from = z + positions[i];
    A* to = v[i].data();
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      to[j] = (static_cast<A>(from[j * kStep]) - at(mean, j)) * at(scale, j) + at(shift, j);
    }
  }
  A* best = v[0].data();
  const A *v1 = v[1].data(), *v2 = v[2].data(), *v3 = v[3].data();
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    // torch's rules: the first of equals wins, NaN beats every number.
    const bool one = (v1[j] > best[j]) | (v1[j] != v1[j]);
    const A best1 = one ? v1[j] : best[j];
    const bool two = (v2[j] > best1) | (v2[j] != v2[j]);
    const A best2 = two ? v2[j] : best1;
    const bool three = (v3[j] > best2) | (v3[j] != v3[j]);
    const A best3 = three ? v3[j] : best2;
    const bool stopped = best3 <= A(0);
    const int code = three ? 3 : two ? 2 : one ? 1 : 0;
    best[j] = stopped ? A(0) : best3;
    codes[j] = static_cast<uint8_t>(stopped ? kStopped : code);
  }
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) y[j] = static_cast<T>(best[j]);
}

// The deviation from the mean of the element that the code points to; 0 where it was stopped.
template <int64_t kStep, typename T>
inline acc_t<T> deviation(const Run& run, const T* z, int64_t j, int code, acc_t<T> mean) {
  using A = acc_t<T>;
  const T* corner = z + j * kStep;
  const int64_t right = to_the_right<kStep>(run);
  const A v[4] = {static_cast<A>(corner[0]), static_cast<A>(corner[right]),
                  static_cast<A>(corner[run.row]), static_cast<A>(corner[run.row + right])};
  const A top = code == 1 ? v[1] : v[0], bottom = code == 3 ? v[3] : v[2];
  return code < kStopped ? (code < 2 ? top : bottom) - mean : A(0);
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

// A run of `count` windows of the backward pass: dz at all four positions. grads: room for the
// gradients of adjacent elements.
template <int64_t kStep, bool kTraining, typename T, typename At>
void spread_run(const Run& run, int64_t count, const T* dy, const uint8_t* codes, const T* z,
                const acc_t<T>* mean, const GradCoefficients<acc_t<T>>& k, const At& at,
                acc_t<T>* grads, T* dz) {
  using A = acc_t<T>;
  for (int row = 0; row < 2; ++row) {
    if constexpr (kStep == 2) {
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) {
        const A grad = static_cast<A>(dy[j]) * at(k.by_grad, j);
        grads[2 * j] = codes[j] == 2 * row ? grad : A(0);
        grads[2 * j + 1] = codes[j] == 2 * row + 1 ? grad : A(0);
      }
      const int64_t offset = row * run.row;
      input_grad_run<kTraining>(2 * count, grads, z + offset, mean, k, at, dz + offset);
    } else {
      for (int column = 0; column < 2; ++column) {
        const int position = 2 * row + column;
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) {
          const A grad = static_cast<A>(dy[j]) * at(k.by_grad, j);
          grads[j] = codes[j] == position ? grad : A(0);
        }
        const int64_t offset = row * run.row + column * run.position;
        input_grad_run<kTraining>(count, grads, z + offset, mean, k, at, dz + offset);
      }
    }
  }
}

// Fills partials with the sums of g and of g * (z - mean) at the maxima.
template <typename T>
void pooled_sums(const BnPoolShape& shape, const BatchNormShape& pooled, const T* dy, const T* z,
                 const uint32_t* codes, const acc_t<T>* mean, Partial* partials) {
  using A = acc_t<T>;
  const Run run = Run::of(shape);
  const int64_t c = shape.c, p = shape.p(), q = shape.q();
  reduce(
      pooled, partials,
      [&](int64_t offset, int64_t channel, Partial* result) {
        std::vector<uint8_t> unpacked(q);
        const T* plane = z + offset / pooled.inner * shape.h * shape.w;
        for (int64_t row = 0; row < p; ++row) {
          const int64_t first = offset + row * q;
          unpack(codes, first, q, unpacked.data());
          const T* corner = plane + 2 * row * shape.w;
          const uint8_t* code = unpacked.data();
          A sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
          for (int64_t j = 0; j < q; ++j) {
            const A g = code[j] < kStopped ? static_cast<A>(dy[first + j]) : A(0);
            sum += g;
            dot += g * deviation<2>(run, corner, j, code[j], mean[channel]);
          }
          result->first += sum;
          result->second += dot;
        }
      },
      [&](int64_t offset, int64_t pixels, Partial* results) {
        std::vector<uint8_t> unpacked(c);
        std::vector<A> sum(c), dot(c);
        for (int64_t begin = 0; begin < pixels; begin += kRowBlock) {
          std::fill(sum.begin(), sum.end(), A(0));
          std::fill(dot.begin(), dot.end(), A(0));
          for (int64_t i = begin; i < std::min(begin + kRowBlock, pixels); ++i) {
            const int64_t first = offset + i * c, pixel = first / c;
            const int64_t image = pixel / (p * q), row = pixel / q % p, column = pixel % q;
            unpack(codes, first, c, unpacked.data());
            const T* corner = z + ((image * shape.h + 2 * row) * shape.w + 2 * column) * c;
            const uint8_t* code = unpacked.data();
#pragma omp simd
            for (int64_t j = 0; j < c; ++j) {
              const A g = code[j] < kStopped ? static_cast<A>(dy[first + j]) : A(0);
              sum[j] += g;
              dot[j] += g * deviation<1>(run, corner, j, code[j], mean[j]);
            }
          }
          for (int64_t j = 0; j < c; ++j) {
            results[j].first += sum[j];
            results[j].second += dot[j];
          }
        }
      });
}

// Pairs of rows of z: `count` of them, cut-off ones included, each `runs` runs of `length` windows.
struct RowPairs {
  int64_t per_image, runs, length;

  explicit RowPairs(const BnPoolShape& shape)
      : per_image((shape.h + 1) / 2),
        runs(shape.channels_last ? shape.q() : 1),
        length(shape.channels_last ? shape.c : shape.q()) {}
};

template <bool kTraining, typename T>
void spread(const BnPoolShape& shape, const T* dy, const uint32_t* codes, const T* z,
            const acc_t<T>* mean, const GradCoefficients<acc_t<T>>& k, T* dz) {
  const Run run = Run::of(shape);
  const RowPairs pairs(shape);
  const int64_t images = shape.channels_last ? shape.n : shape.n * shape.c;
  const int64_t depth = shape.channels_last ? shape.c : 1, row_size = shape.w * depth;
  const int64_t pooled_row = shape.q() * depth;
  const int64_t grain = std::max<int64_t>(1, kGrain / (2 * row_size));
  parallel_for(0, images * pairs.per_image, grain, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> unpacked(pooled_row);
    // A run of adjacent elements is a row of z in NCHW, the channels of a pixel in NHWC.
    std::vector<acc_t<T>> grads(shape.channels_last ? shape.c : shape.w), no_grads(grads.size());
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / pairs.per_image, row = i % pairs.per_image;
      const int64_t corner = (image * shape.h + 2 * row) * row_size;
      with_coefficients(shape, image % shape.c, [&](const auto& at) {
        // `count` pixels (NHWC) or elements (NCHW) from `offset` on.
        const auto uncovered = [&](int64_t offset, int64_t count) {
          const int64_t length = shape.channels_last ? depth : count;
          for (int64_t at_run = offset; at_run < offset + count * depth; at_run += length) {
            input_grad_run<kTraining>(length, no_grads.data(), z + at_run, mean, k, at,
                                      dz + at_run);
          }
        };
        if (row == shape.p()) return uncovered(corner, shape.w);
        const int64_t first = (image * shape.p() + row) * pooled_row;
        unpack(codes, first, pooled_row, unpacked.data());
        with_step(run, [&](auto step) {
          constexpr int64_t kStep = decltype(step)::value;
          for (int64_t r = 0; r < pairs.runs; ++r) {
            const int64_t from = corner + r * 2 * depth, in_row = r * pairs.length;
            spread_run<kStep, kTraining>(run, pairs.length, dy + first + in_row,
                                         unpacked.data() + in_row, z + from, mean, k, at,
                                         grads.data(), dz + from);
          }
        });
        if (shape.w % 2 != 0) {
          uncovered(corner + row_size - depth, 1);
          uncovered(corner + 2 * row_size - depth, 1);
        }
      });
    }
  });
}

BatchNormShape pooled_norm(const BnPoolShape& shape) {
  return {shape.dtype, shape.n, shape.c, shape.p() * shape.q(), shape.channels_last};
}

const KernelEntry kEntry({"bn_relu2d", "bn_pool", "float64 float32 bfloat16 float16",
                          "cpu", true,
                          "normalises and pools in one pass; 4-bit codes for the backward pass"});

}  // namespace

void bn_pool_forward(Stream, const BnPoolShape& shape, const void* z,
                     const BatchNormStatistics& statistics, void* y, uint32_t* codes) {
  std::fill_n(codes, bn_pool_code_words(shape), 0u);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const auto* m = static_cast<const A*>(statistics.mean);
    const auto* a = static_cast<const A*>(statistics.scale);
    const auto* b = static_cast<const A*>(statistics.shift);
    const Run run = Run::of(shape);
    const RowPairs pairs(shape);
    const int64_t images = shape.channels_last ? shape.n : shape.n * shape.c, p = shape.p();
    const int64_t depth = shape.channels_last ? shape.c : 1, pooled_row = shape.q() * depth;
    const int64_t grain = std::max<int64_t>(1, kGrain / (4 * pooled_row));
    parallel_for(0, images * p, grain, [&](int64_t begin, int64_t end) {
      std::vector<uint8_t> row_codes(pooled_row);
      std::vector<A> v[4];
      for (auto& values : v) values.resize(pairs.length);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / p;
        const T* corner =
            static_cast<const T*>(z) + (image * shape.h + 2 * (i % p)) * shape.w * depth;
        T* out = static_cast<T*>(y) + i * pooled_row;
        with_coefficients(shape, image % shape.c, [&](const auto& at) {
          with_step(run, [&](auto step) {
            for (int64_t r = 0; r < pairs.runs; ++r) {
              const int64_t in_row = r * pairs.length;
              pool_run<decltype(step)::value>(run, pairs.length, corner + r * 2 * depth, m, a, b,
                                              at, v, out + in_row, row_codes.data() + in_row);
            }
          });
        });
        pack(row_codes.data(), i * pooled_row, pooled_row, codes);
      }
    });
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
    if (training) {
      spread<true>(shape, grad, codes, in, m, k, out);
    } else {
      spread<false>(shape, grad, codes, in, m, k, out);
    }
  });
}

}  // namespace braze::cpu
