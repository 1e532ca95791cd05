// The epilogue of the matrix product's kernels on the CPU: bias, residual, ReLU, a ReLU's gradient,
// and the sums of C's columns and rows.
#pragma once

#include <algorithm>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/matmul.h"

namespace braze::cpu {

inline bool changes_values(const MatmulArgs& args) { return args.residual || args.relu_result; }

// The full epilogue behind the bias: `count` values, those of row `row` of C (of all batches' rows)
// from `column` on, to C. They are overwritten. One part at a time, so that each loop is
// vectorised.
template <typename T>
inline void finish_row(const MatmulArgs& args, acc_t<T>* __restrict__ values, int64_t row,
                       int64_t column, int64_t count) {
  using Acc = acc_t<T>;
  const int64_t offset = row * args.n + column;
  if (args.residual) {
    const T* __restrict__ residual = static_cast<const T*>(args.residual) + offset;
    for (int64_t j = 0; j < count; ++j) values[j] += static_cast<Acc>(residual[j]);
  }
  if (args.relu) {
    for (int64_t j = 0; j < count; ++j) values[j] = values[j] < 0 ? Acc(0) : values[j];
  }
  if (args.relu_result) {
    const T* __restrict__ result = static_cast<const T*>(args.relu_result) + offset;
    for (int64_t j = 0; j < count; ++j) {
      values[j] = static_cast<Acc>(result[j]) <= Acc(0) ? Acc(0) : values[j];  // NaN passes
    }
  }
  T* __restrict__ c = static_cast<T*>(args.c) + offset;
  for (int64_t j = 0; j < count; ++j) c[j] = T(values[j]);
}

// Rows that are summed one after the other before the partial sums are added up, in the same order
// for any number of threads: short chains of additions round less. A task takes several of them.
constexpr int64_t kSumRows = 32, kSumsPerTask = 8;

inline int64_t column_sum_parts(int64_t rows) { return ceil_div(rows, kSumRows); }

// out[j] = the sum over the rows, of which prepare(begin, end) gives the first of rows [begin, end)
// before they are read. partial: column_sum_parts(rows) times `columns` elements.
template <typename T, typename Prepare>
void sum_columns(int64_t rows, int64_t columns, acc_t<T>* partial, T* out, const Prepare& prepare) {
  using Acc = acc_t<T>;
  const int64_t blocks = column_sum_parts(rows);
  parallel_for(0, blocks, kSumsPerTask, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * kSumRows, end = std::min(rows, begin + kSumRows);
      const T* in = prepare(begin, end);
      if (!out) continue;
      Acc* __restrict__ sum = partial + block * columns;
      std::fill(sum, sum + columns, Acc(0));
      for (int64_t i = begin; i < end; ++i, in += columns) {
        const T* __restrict__ row = in;
        for (int64_t j = 0; j < columns; ++j) sum[j] += static_cast<Acc>(row[j]);
      }
    }
  });
  for (int64_t j = 0; out && j < columns; ++j) {
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += partial[block * columns + j];
    out[j] = T(static_cast<Acc>(sum));
  }
}

// out[i] = the sum of row i of a dense matrix, in kLanes interleaved parts.
template <typename T>
void sum_rows(int64_t rows, int64_t columns, const T* in, T* out) {
  using Acc = acc_t<T>;
  constexpr int kLanes = 16;
  parallel_for(0, rows, kSumRows, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const T* __restrict__ row = in + i * columns;
      Acc lanes[kLanes] = {};
      int64_t j = 0;
      for (; j + kLanes <= columns; j += kLanes) {
        for (int k = 0; k < kLanes; ++k) lanes[k] += static_cast<Acc>(row[j + k]);
      }
      for (int k = 0; j < columns; ++j, ++k) lanes[k] += static_cast<Acc>(row[j]);
      double sum = 0;
      for (const Acc lane : lanes) sum += lane;
      out[i] = T(static_cast<Acc>(sum));
    }
  });
}

}  // namespace braze::cpu
