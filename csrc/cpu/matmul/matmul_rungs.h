// The first two rungs of the matrix product's ladder on the CPU: one thread, no tiles. The third is
// matmul.cpp's blocked kernel.
#pragma once

#include <algorithm>

#include "cpu/matmul/epilogue.h"
#include "cpu/matmul/gemm.h"
#include "cpu/common/numeric.h"
#include "launchers/matmul.h"

namespace braze::cpu {

// Rung 1: the triple loop of the formula. The innermost loop adds to one sum, each addition waiting
// for the one before, and walks down a column of B: for a row-major B every step is another cache
// line, of which one element is used.
template <typename T>
void naive_matmul(const MatmulArgs& args) {
  using Acc = acc_t<T>;
  const T* a = static_cast<const T*>(args.a.data);
  const T* b = static_cast<const T*>(args.b.data);
  const T* bias = static_cast<const T*>(args.bias);
  T* c = static_cast<T*>(args.c);
  for (int64_t l = 0; l < args.batch; ++l) {
    for (int64_t i = 0; i < args.m; ++i) {
      for (int64_t j = 0; j < args.n; ++j) {
        const T* row = a + l * args.a.batch + i * args.a.row;
        const T* column = b + l * args.b.batch + j * args.b.col;
        Acc sum = 0;
        for (int64_t p = 0; p < args.k; ++p) {
          sum += static_cast<Acc>(row[p * args.a.col]) * static_cast<Acc>(column[p * args.b.row]);
        }
        if (bias) sum += static_cast<Acc>(bias[j]);
        if (changes_values(args)) {
          finish_row<T>(args, &sum, l * args.m + i, j, 1);
        } else {
          c[(l * args.m + i) * args.n + j] = relu_if<T>(args.relu, sum);
        }
      }
    }
  }
}

// Rung 2: the two inner loops swapped. The innermost one now runs along a row of B and a row of
// sums: for a row-major B consecutive cache lines, all of whose elements are used, and additions
// that do not depend on each other, which the compiler turns into vectors. What limits it is that
// every multiply-add loads B and a sum, and stores a sum; and B comes from memory again for every
// row of A.
//
// sums: n of them.
template <typename T>
void reordered_matmul(const MatmulArgs& args, acc_t<T>* __restrict__ sums) {
  using Acc = acc_t<T>;
  const T* a = static_cast<const T*>(args.a.data);
  const T* b = static_cast<const T*>(args.b.data);
  const T* bias = static_cast<const T*>(args.bias);
  T* c = static_cast<T*>(args.c);
  const int64_t n = args.n;
  for (int64_t l = 0; l < args.batch; ++l) {
    for (int64_t i = 0; i < args.m; ++i) {
      std::fill(sums, sums + n, Acc(0));
      for (int64_t p = 0; p < args.k; ++p) {
        const Acc x = static_cast<Acc>(a[l * args.a.batch + i * args.a.row + p * args.a.col]);
        const T* __restrict__ row = b + l * args.b.batch + p * args.b.row;
        if (args.b.col == 1) {  // a stride that the compiler knows
          for (int64_t j = 0; j < n; ++j) sums[j] += x * static_cast<Acc>(row[j]);
        } else {
          for (int64_t j = 0; j < n; ++j) sums[j] += x * static_cast<Acc>(row[j * args.b.col]);
        }
      }
      if (changes_values(args)) {
        for (int64_t j = 0; bias && j < n; ++j) sums[j] += static_cast<Acc>(bias[j]);
        finish_row<T>(args, sums, l * args.m + i, 0, n);
        continue;
      }
      for (int64_t j = 0; j < n; ++j) {
        const Acc sum = bias ? sums[j] + static_cast<Acc>(bias[j]) : sums[j];
        c[(l * args.m + i) * n + j] = relu_if<T>(args.relu, sum);
      }
    }
  }
}

}  // namespace braze::cpu
