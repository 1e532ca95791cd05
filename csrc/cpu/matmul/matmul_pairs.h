// bf16 matrix products by instructions that multiply pairs of bf16: AMX's tiles (amx.h), or
// AVX-512's vectors (dot_bf16.h). Blocked as in matmul.cpp: B is packed whole, in panels of 32
// columns; a task packs its rows of A, 512 deep, and takes them past panels of B, which the
// first-level cache holds meanwhile.
#pragma once

#include "cpu/matmul/amx.h"
#include "cpu/matmul/dot_bf16.h"
#include "cpu/common/copy_matrix.h"
#include "cpu/matmul/gemm.h"
#include "launchers/matmul.h"

namespace braze::cpu {

// What multiplies: rows of A, `depth` values of each, in multiples of kRowStep and kStep and `ld`
// values apart, times a panel of B of 32 columns, of which `columns` are wanted. One lives while a
// task runs.
#ifdef BRAZE_HAS_AMX
class AmxTiles {
 public:
  static constexpr int64_t kRowStep = 16, kStep = 32, kMostPanels = 32;
  static bool available() { return amx_available(); }
  // Below that, packing takes longer than multiplying saves.
  static constexpr int64_t kLeastDepth = 16, kLeastWork = int64_t{1} << 18;

  void multiply(const uint16_t* a, int64_t ld, int64_t rows, int64_t depth, const uint32_t* panel,
                int64_t columns, float* out, bool accumulate) const {
    const int64_t steps = depth / kStep;
    const auto pairs = [=](int64_t s) { return panel + s * 16 * 32; };
    for (int64_t i = 0; i < rows; i += 32, a += 32 * ld, out += 32 * 32) {
      const uint16_t* const first = a;
      multiply_block(
          rows - i, columns, steps, [=](int64_t s) { return first + s * 32; }, ld, pairs, 32, out,
          32, accumulate);
    }
  }

 private:
  const WholeTiles tiles_;
};
#else
class AmxTiles;
#endif

#ifdef BRAZE_HAS_DOT_BF16
class DotProducts {
 public:
  static constexpr int64_t kRowStep = 1, kStep = 2, kMostPanels = 8;
  static bool available() { return dot_bf16_pays(); }
  static constexpr int64_t kLeastDepth = 2, kLeastWork = 1 << 12;

  void multiply(const uint16_t* a, int64_t ld, int64_t rows, int64_t depth, const uint32_t* panel,
                int64_t, float* out, bool accumulate) const {
    rows_times_panel(reinterpret_cast<const Bf16Pair*>(a), ld / 2, rows,
                     reinterpret_cast<const float*>(panel), 32, depth / 2, out, 32, accumulate);
  }
};
#else
class DotProducts;
#endif

#if defined(BRAZE_HAS_AMX) || defined(BRAZE_HAS_DOT_BF16)

template <typename Unit>
struct PairPlan {
  static constexpr int64_t kWidth = 32, kStep = Unit::kStep, kDepth = 512;
  static constexpr int64_t kRowStep = Unit::kRowStep;
  static constexpr int64_t kLeastTask = 1 << 19;  // products of two numbers

  explicit PairPlan(const MatmulArgs& args)
      : panels(ceil_div(args.n, kWidth)),
        depth(round_up(args.k, kStep)),
        b_matrices(args.b.batch == 0 ? 1 : args.batch),
        block_rows(std::clamp<int64_t>(round_up(args.m, kRowStep), kRowStep, 256)),
        block_panels(std::clamp<int64_t>(panels, 1, Unit::kMostPanels)) {
    const int64_t packed = panels * kWidth * depth * 2;  // bytes of one matrix
    group = std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(1, packed), 1,
                                std::max<int64_t>(1, args.batch));
    const int64_t wanted = 2 * num_threads();
    const auto tasks = [&] {
      return std::min(group, args.batch) * ceil_div(args.m, block_rows) *
             ceil_div(panels, block_panels);
    };
    while (num_threads() > 1 && tasks() < wanted && block_rows > 64) {
      block_rows = round_up(block_rows / 2, kRowStep);
    }
    while (num_threads() > 1 && tasks() < wanted && block_panels > 4) {
      block_panels = (block_panels + 1) / 2;
    }
    // Of a product of few rows and columns a part for each thread, as long as that is worth handing
    // over: 64 x 128 x 3136 would be one task.
    const auto idle = [&] {
      const int64_t count = tasks(), products = args.batch * args.m * args.n * args.k;
      return count > 0 && count < num_threads() && products / (2 * count) >= kLeastTask;
    };
    while (idle() && block_panels > 1) block_panels = (block_panels + 1) / 2;
    while (idle() && block_rows > 16) block_rows = round_up(block_rows / 2, kRowStep);
    if (b_matrices == 1) group = args.batch;
  }

  // Packed B; then for each worker packed A and sums.
  int64_t bytes() const { return b_bytes() + num_threads() * worker_bytes(); }

  int64_t b_size() const { return panels * kWidth * depth / 2; }  // pairs of one matrix
  int64_t b_bytes() const { return std::min(group, b_matrices) * b_size() * 4; }
  int64_t a_bytes() const { return block_rows * std::min(depth, kDepth) * 2; }
  int64_t worker_bytes() const { return a_bytes() + block_rows * block_panels * kWidth * 4; }

  // Where it pays.
  static bool preferred(const MatmulArgs& args) {
    return args.dtype == DType::kBFloat16 && args.k >= Unit::kLeastDepth &&
           args.m * args.n * args.k >= Unit::kLeastWork && Unit::available();
  }

  int64_t panels, depth;             // of 32 columns; in whole steps
  int64_t b_matrices, group = 1;     // different ones; those of the batch that are packed together
  int64_t block_rows, block_panels;  // of C, for one task
};

template <typename Unit>
class PairMatmul {
 public:
  PairMatmul(const MatmulArgs& args, const PairPlan<Unit>& plan) : args_(args), plan_(plan) {}

  // store(tiles, width, matrix, first row, rows, column, columns): a column of finished sums.
  template <typename Store>
  void run(void* workspace, const Store& store) const {
    uint32_t* const packed_b = static_cast<uint32_t*>(workspace);
    char* const workers = static_cast<char*>(workspace) + plan_.b_bytes();
    const int64_t col_blocks = ceil_div(plan_.panels, plan_.block_panels);
    const int64_t per_matrix = ceil_div(args_.m, plan_.block_rows) * col_blocks;
    for (int64_t first = 0; first < args_.batch; first += plan_.group) {
      const int64_t count = std::min(plan_.group, args_.batch - first);
      pack_b(packed_b, first, std::min(count, plan_.b_matrices));
      for_each_task(count * per_matrix, [&](int64_t worker, int64_t task) {
        const Unit unit;
        const int64_t slot = task / per_matrix, index = task % per_matrix;
        block(unit, packed_b + (plan_.b_matrices == 1 ? 0 : slot * plan_.b_size()),
              workers + worker * plan_.worker_bytes(), first + slot,
              index / col_blocks * plan_.block_rows, index % col_blocks * plan_.block_panels,
              store);
      });
    }
  }

 private:
  static constexpr int64_t kWidth = PairPlan<Unit>::kWidth, kStep = Unit::kStep;
  static constexpr int64_t kDepth = PairPlan<Unit>::kDepth;

  // Matrices [first, first + count) of B: panels, in which rows of pairs follow each other.
  void pack_b(uint32_t* packed, int64_t first, int64_t count) const {
    parallel_for(0, count * plan_.panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t matrix = i / plan_.panels, column = i % plan_.panels * kWidth;
        const uint16_t* const from = static_cast<const uint16_t*>(args_.b.data) +
                                     (first + matrix) * args_.b.batch + column * args_.b.col;
        uint32_t* const to =
            packed + matrix * plan_.b_size() + i % plan_.panels * kWidth * plan_.depth / 2;
        pack_pairs(to, kWidth, from, args_.b.col, args_.b.row, std::min(kWidth, args_.n - column),
                   args_.k);
        std::fill(to + ceil_div(args_.k, 2) * kWidth, to + plan_.depth / 2 * kWidth, 0u);
      }
    });
  }

  // Rows of A, `depth` deep, padded with zeros to whole tiles.
  void pack_a(uint16_t* to, const uint16_t* from, int64_t rows, int64_t depth) const {
    const int64_t row = args_.a.row, col = args_.a.col, width = round_up(depth, kStep);
    for (int64_t i = 0; i < rows; ++i) {
      if (col == 1) std::copy(from + i * row, from + i * row + depth, to + i * width);
      std::fill(to + i * width + depth, to + (i + 1) * width, 0);
    }
    std::fill(to + rows * width, to + round_up(rows, Unit::kRowStep) * width, 0);
    if (col == 1) return;
    constexpr int64_t kBlock = 32;  // columns in memory become rows in the first-level cache
    for (int64_t i0 = 0; i0 < rows; i0 += kBlock) {
      for (int64_t p0 = 0; p0 < depth; p0 += kBlock) {
        const int64_t end = std::min(depth, p0 + kBlock);
        for (int64_t i = i0; i < std::min(rows, i0 + kBlock); ++i) {
          for (int64_t p = p0; p < end; ++p) to[i * width + p] = from[i * row + p * col];
        }
      }
    }
  }

  template <typename Store>
  void block(const Unit& unit, const uint32_t* b, char* memory, int64_t matrix, int64_t first_row,
             int64_t first_panel, const Store& store) const {
    uint16_t* const packed = reinterpret_cast<uint16_t*>(memory);
    float* const sums = reinterpret_cast<float*>(memory + plan_.a_bytes());
    const int64_t rows = std::min(plan_.block_rows, args_.m - first_row),
                  padded = round_up(rows, Unit::kRowStep);
    const int64_t last_panel = std::min(first_panel + plan_.block_panels, plan_.panels);
    const uint16_t* const a = static_cast<const uint16_t*>(args_.a.data) + matrix * args_.a.batch +
                              first_row * args_.a.row;
    const int64_t tile = padded * kWidth;
    const auto store_panel = [&](int64_t j) {
      store(sums + (j - first_panel) * tile, kWidth, matrix, first_row, rows, j * kWidth,
            std::min(kWidth, args_.n - j * kWidth));
    };
    if (args_.k == 0) {
      std::fill(sums, sums + (last_panel - first_panel) * tile, 0.0f);
      for (int64_t j = first_panel; j < last_panel; ++j) store_panel(j);
    }
    for (int64_t p = 0; p < args_.k; p += kDepth) {
      const int64_t depth = std::min(kDepth, args_.k - p);
      const bool in_place = can_read(depth);
      const int64_t ld = in_place ? args_.a.row : round_up(depth, kStep);
      if (!in_place) pack_a(packed, a + p * args_.a.col, rows, depth);
      for (int64_t j = first_panel; j < last_panel; ++j) {
        unit.multiply(in_place ? a + p : packed, ld, padded, round_up(depth, kStep),
                      b + j * kWidth * plan_.depth / 2 + p / 2 * kWidth, args_.n - j * kWidth,
                      sums + (j - first_panel) * tile, p > 0);
        if (p + depth == args_.k) store_panel(j);
      }
    }
  }

  // Whether rows of A can be read where they are: pairs of values side by side, in whole steps, and
  // not a multiple of a page apart, which would have them meet in one set of the first-level cache.
  bool can_read(int64_t depth) const {
    constexpr int64_t kPage = 2048;
    return kStep == 2 && depth % 2 == 0 && args_.a.col == 1 && args_.a.row % 2 == 0 &&
           args_.a.row % kPage != 0;
  }

  const MatmulArgs& args_;
  const PairPlan<Unit>& plan_;
};

#else

template <typename Unit>
struct PairPlan {
  static constexpr int64_t kWidth = 32;
  explicit PairPlan(const MatmulArgs&) {}
  int64_t bytes() const { return 0; }
  static bool preferred(const MatmulArgs&) { return false; }
};

template <typename Unit>
struct PairMatmul {
  PairMatmul(const MatmulArgs&, const PairPlan<Unit>&) {}
  template <typename Store>
  void run(void*, const Store&) const {}
};

#endif

}  // namespace braze::cpu
