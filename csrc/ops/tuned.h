// What tuning found out: for a matrix product or a pass of a convolution, the kernel that was
// measured to be the fastest. Each of the two libraries has tables of its own, which Python fills
// (python/braze/_tuned.py); "auto" asks them before the rules. And the record of the problems that
// were asked for, which is what braze.tune() measures. No torch here: module.cpp includes this.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "launchers/common/hash_words.h"
#include "launchers/conv2d.h"
#include "launchers/matmul.h"

namespace braze {

// For exports.cpp, which hands Python an entry or a recorded problem.
using VisitChoice = void(void* state, const int64_t* problem, const char* choice, int measured);
using VisitProblem = void(void* state, const int64_t* problem);

// The choices for one op's problems, each an array of words. Any thread may ask.
template <size_t kWords>
class TunedTable {
 public:
  using Problem = std::array<int64_t, kWords>;

  // Whether there is an entry, and whether problems are being recorded: else neither has to be
  // asked.
  std::atomic<bool> in_use{false}, recording{false};

  // The choice for a problem, as the `backend` argument takes it, or an empty string. Measured
  // choices, unlike built-in ones, may differ from process to process: `deterministic` ignores
  // them. (Any choice is bitwise repeatable by itself: own kernels and the libraries' as
  // csrc/libraries asks for them.)
  std::string choice(const Problem& problem, bool deterministic);
  void set(const Problem& problem, const std::string& choice, bool measured);
  void clear();

  // While recording, each problem that asks for "auto" is kept, once.
  void record(bool on);
  void record(const Problem& problem);

  // Calls visit for each entry, and for each recorded problem, in the order in which they were
  // asked for.
  void for_each_choice(VisitChoice* visit, void* state);
  void for_each_recorded(VisitProblem* visit, void* state);

 private:
  struct Choices {
    std::string built_in, measured;  // empty: none
  };
  std::unordered_map<Problem, Choices, HashWords> table_;
  std::vector<Problem> recorded_;
  std::shared_mutex mutex_;  // guards the two
};

// All that decides which kernel is the fastest for a product; but for the device the fields of
// Product in python/braze/_tuned.py, in the same order:
//   device (index, -1 for the CPU), dtype (DType), tf32, batch, m, n, k,
//   for A and then for B: column_major, shared (one matrix for the whole batch), aligned,
//   bias, relu
// aligned: addresses and strides are multiples of 16 bytes, which TMA and vector loads need.
using TunedProducts = TunedTable<15>;
using Product = TunedProducts::Problem;

// Empty for a product that is not tuned: an empty one, or one whose operands are no matrices with a
// stride of 1.
std::optional<Product> product_of(const MatmulArgs& args, int device);

// The same for a pass of a convolution, with Convolution's fields:
//   device, dtype, tf32, pass (Conv2dPass), n, c, h, w, k, r, s, stride, padding and dilation (two
//   values each), groups, channels_last, bias
using TunedConvolutions = TunedTable<20>;
using ConvolutionPass = TunedConvolutions::Problem;

// Empty for what is not tuned: an empty pass, fewer outputs than fit (conv_transpose2d), tensors
// that are not all dense in one of the two memory formats (contiguous, where they are in both), or
// not aligned to 16 bytes.
std::optional<ConvolutionPass> convolution_pass_of(const Conv2dProblem& problem, bool bias,
                                                   int device);

extern TunedProducts& tuned_products;
extern TunedConvolutions& tuned_convolutions;

}  // namespace braze
