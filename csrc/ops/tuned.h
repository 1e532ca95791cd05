// What tuning found out: for a matrix product, the kernel that was measured to be the fastest. Each
// of the two libraries has a table of its own, which Python fills (python/braze/_tuned.py); "auto"
// asks it before the rules. And the record of the products that were asked for, which is what
// braze.tune() measures. No torch here: module.cpp includes this.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "launchers/matmul.h"

namespace braze {

// All that decides which kernel is the fastest for a product; but for the device the fields of
// Product in python/braze/_tuned.py, in the same order:
//   device (index, -1 for the CPU), dtype (DType), tf32, batch, m, n, k,
//   for A and then for B: column_major, shared (one matrix for the whole batch), aligned,
//   bias, relu
// aligned: addresses and strides are multiples of 16 bytes, which TMA and vector loads need.
using Product = std::array<int64_t, 15>;

// Empty for a product that is not tuned: an empty one, or one whose operands are no matrices with a
// stride of 1.
std::optional<Product> product_of(const MatmulArgs& args, int device);

// Whether the table has an entry, and whether products are being recorded: else neither has to be
// asked.
extern std::atomic<bool> tuning_in_use, recording_products;

// The choice for a product, as the `backend` argument takes it, or an empty string. Measured
// choices, unlike built-in ones, may differ from process to process: `deterministic` ignores them.
// (Any choice is bitwise repeatable by itself: own kernels and cuBLASLt's as libraries/cublas.cpp
// asks for them.)
std::string tuned_choice(const Product& product, bool deterministic);
void set_tuned_choice(const Product& product, const std::string& choice, bool measured);
void clear_tuned_choices();

// While recording, each product that asks for "auto" is kept, once.
void record_products(bool on);
void record_product(const Product& product);

// For exports.cpp: calls visit for each entry, and for each recorded product, in the order in which
// they were asked for.
using VisitChoice = void(void* state, const int64_t* product, const char* choice, int measured);
using VisitProduct = void(void* state, const int64_t* product);
void for_each_choice(VisitChoice* visit, void* state);
void for_each_recorded(VisitProduct* visit, void* state);

}  // namespace braze
