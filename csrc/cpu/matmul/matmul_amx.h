// bf16 matrix products on Intel's tile registers (amx.h), blocked as in matmul.cpp: B is packed
// whole, in panels of 32 columns; a task packs its rows of A, 512 deep, and takes them past panels
// of B, which the first-level cache holds meanwhile.
#pragma once

#include "cpu/matmul/amx.h"
#include "cpu/common/copy_matrix.h"
#include "cpu/matmul/gemm.h"
#include "launchers/matmul.h"

namespace braze::cpu {

#ifdef BRAZE_HAS_AMX

struct AmxPlan {
  static constexpr int64_t kWidth = 32, kStep = 32, kDepth = 512;

  explicit AmxPlan(const MatmulArgs& args)
      : panels(ceil_div(args.n, kWidth)),
        depth(round_up(args.k, kStep)),
        b_matrices(args.b.batch == 0 ? 1 : args.batch),
        block_rows(std::clamp<int64_t>(round_up(args.m, 16), 16, 256)),
        block_panels(std::clamp<int64_t>(panels, 1, 32)) {
    const int64_t packed = panels * kWidth * depth * 2;  // bytes of one matrix
    group = std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(1, packed), 1,
                                std::max<int64_t>(1, args.batch));
    const int64_t wanted = 2 * num_threads();
    const auto tasks = [&] {
      return std::min(group, args.batch) * ceil_div(args.m, block_rows) *
             ceil_div(panels, block_panels);
    };
    while (num_threads() > 1 && tasks() < wanted && block_rows > 64) {
      block_rows = round_up(block_rows / 2, 16);
    }
    while (num_threads() > 1 && tasks() < wanted && block_panels > 4) {
      block_panels = (block_panels + 1) / 2;
    }
    if (b_matrices == 1) group = args.batch;
  }

  // Packed B; then for each worker packed A and sums.
  int64_t bytes() const { return b_bytes() + num_threads() * worker_bytes(); }

  int64_t b_size() const { return panels * kWidth * depth / 2; }  // pairs of one matrix
  int64_t b_bytes() const { return std::min(group, b_matrices) * b_size() * 4; }
  int64_t a_bytes() const { return block_rows * std::min(depth, kDepth) * 2; }
  int64_t worker_bytes() const { return a_bytes() + block_rows * block_panels * kWidth * 4; }

  // Where it pays: below that, packing takes longer than multiplying saves.
  static bool preferred(const MatmulArgs& args) {
    return args.dtype == DType::kBFloat16 && args.k >= 16 &&
           args.m * args.n * args.k >= int64_t{1} << 18 && amx_available();
  }

  int64_t panels, depth;             // of 32 columns; in whole steps
  int64_t b_matrices, group = 1;     // different ones; those of the batch that are packed together
  int64_t block_rows, block_panels;  // of C, for one task
};

class AmxMatmul {
 public:
  AmxMatmul(const MatmulArgs& args, const AmxPlan& plan) : args_(args), plan_(plan) {}

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
        const WholeTiles tiles;
        const int64_t slot = task / per_matrix, index = task % per_matrix;
        block(packed_b + (plan_.b_matrices == 1 ? 0 : slot * plan_.b_size()),
              workers + worker * plan_.worker_bytes(), first + slot,
              index / col_blocks * plan_.block_rows, index % col_blocks * plan_.block_panels,
              store);
      });
    }
  }

 private:
  static constexpr int64_t kWidth = AmxPlan::kWidth, kStep = AmxPlan::kStep;
  static constexpr int64_t kDepth = AmxPlan::kDepth;

  // Matrices [first, first + count) of B: panels, in which rows of pairs follow each other.
  void pack_b(uint32_t* packed, int64_t first, int64_t count) const {
    parallel_for(0, count * plan_.panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t matrix = i / plan_.panels, column = i % plan_.panels * kWidth;
        const uint16_t* const from = static_cast<const uint16_t*>(args_.b.data) +
                                     (first + matrix) * args_.b.batch + column * args_.b.col;
        pack_pairs(packed + matrix * plan_.b_size() + i % plan_.panels * kWidth * plan_.depth / 2,
                   from, std::min(kWidth, args_.n - column));
      }
    });
  }

  void pack_pairs(uint32_t* to, const uint16_t* from, int64_t columns) const {
    const int64_t row = args_.b.row, col = args_.b.col, k = args_.k;
    // What stays zero beside the columns, or below the pairs.
    std::fill(to + (columns < kWidth ? 0 : k / 2 * kWidth), to + plan_.depth / 2 * kWidth, 0u);
    if (row == 1 && col % 2 == 0) {  // pairs as they are: a transposition of 32-bit elements
      copy_matrix(reinterpret_cast<float*>(to), kWidth, reinterpret_cast<const float*>(from), 1,
                  col / 2, k / 2, columns);
    } else {
      for (int64_t p = 0; p < k / 2; ++p) {
        uint32_t* __restrict__ out = to + p * kWidth;
        const uint16_t *low = from + 2 * p * row, *high = low + row;
        for (int64_t j = 0; j < columns; ++j) {
          out[j] = low[j * col] | static_cast<uint32_t>(high[j * col]) << 16;
        }
      }
    }
    uint32_t* const last = to + k / 2 * kWidth;
    for (int64_t j = 0; k % 2 == 1 && j < columns; ++j) last[j] = from[(k - 1) * row + j * col];
  }

  // Rows of A, `depth` deep, padded with zeros to whole tiles.
  void pack_a(uint16_t* to, const uint16_t* from, int64_t rows, int64_t depth) const {
    const int64_t row = args_.a.row, col = args_.a.col, width = round_up(depth, kStep);
    for (int64_t i = 0; i < rows; ++i) {
      if (col == 1) std::copy(from + i * row, from + i * row + depth, to + i * width);
      std::fill(to + i * width + depth, to + (i + 1) * width, 0);
    }
    std::fill(to + rows * width, to + round_up(rows, 16) * width, 0);
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
  void block(const uint32_t* b, char* memory, int64_t matrix, int64_t first_row,
             int64_t first_panel, const Store& store) const {
    uint16_t* const packed = reinterpret_cast<uint16_t*>(memory);
    float* const sums = reinterpret_cast<float*>(memory + plan_.a_bytes());
    const int64_t rows = std::min(plan_.block_rows, args_.m - first_row),
                  padded = round_up(rows, 16);
    const int64_t last_panel = std::min(first_panel + plan_.block_panels, plan_.panels);
    const uint16_t* const a = static_cast<const uint16_t*>(args_.a.data) + matrix * args_.a.batch +
                              first_row * args_.a.row;
    if (args_.k == 0) std::fill(sums, sums + (last_panel - first_panel) * padded * kWidth, 0.0f);
    for (int64_t p = 0; p < args_.k; p += kDepth) {
      const int64_t depth = std::min(kDepth, args_.k - p), width = round_up(depth, kStep);
      pack_a(packed, a + p * args_.a.col, rows, depth);
      for (int64_t j = first_panel; j < last_panel; ++j) {
        const uint32_t* const panel = b + j * kWidth * plan_.depth / 2 + p / 2 * kWidth;
        float* const out = sums + (j - first_panel) * padded * kWidth;
        const bool wide = args_.n - j * kWidth > 16;
        for (int64_t i = 0; i < padded; i += 32) {
          const uint16_t* const from = packed + i * width;
          float* const to = out + i * kWidth;
          const int64_t steps = width / kStep;
          if (padded - i > 16) {
            wide ? multiply_tiles<2, 2>(steps, from, width, panel, to, kWidth, p > 0)
                 : multiply_tiles<2, 1>(steps, from, width, panel, to, kWidth, p > 0);
          } else {
            wide ? multiply_tiles<1, 2>(steps, from, width, panel, to, kWidth, p > 0)
                 : multiply_tiles<1, 1>(steps, from, width, panel, to, kWidth, p > 0);
          }
        }
      }
    }
    for (int64_t j = first_panel; j < last_panel; ++j) {
      const int64_t column = j * kWidth;
      store(sums + (j - first_panel) * padded * kWidth, kWidth, matrix, first_row, rows, column,
            std::min(kWidth, args_.n - column));
    }
  }

  const MatmulArgs& args_;
  const AmxPlan& plan_;
};

#else

struct AmxPlan {
  explicit AmxPlan(const MatmulArgs&) {}
  int64_t bytes() const { return 0; }
  static bool preferred(const MatmulArgs&) { return false; }
};

struct AmxMatmul {
  AmxMatmul(const MatmulArgs&, const AmxPlan&) {}
  template <typename Store>
  void run(void*, const Store&) const {}
};

#endif

}  // namespace braze::cpu
