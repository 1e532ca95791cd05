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

class AmxMatmul {
 public:
  explicit AmxMatmul(const MatmulArgs& args)
      : args_(args),
        panels_(ceil_div(args.n, kWidth)),
        depth_(round_up(args.k, kStep)),
        b_matrices_(args.b.batch == 0 ? 1 : args.batch),
        block_rows_(std::clamp<int64_t>(round_up(args.m, 16), 16, 256)),
        block_panels_(std::clamp<int64_t>(panels_, 1, 32)) {
    const int64_t packed = panels_ * kWidth * depth_ * 2;  // bytes of one matrix
    group_ = std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(1, packed), 1,
                                 std::max<int64_t>(1, args.batch));
    const int64_t wanted = 2 * num_threads();
    while (num_threads() > 1 && tasks() < wanted && block_rows_ > 64) {
      block_rows_ = round_up(block_rows_ / 2, 16);
    }
    while (num_threads() > 1 && tasks() < wanted && block_panels_ > 4) {
      block_panels_ = (block_panels_ + 1) / 2;
    }
    if (b_matrices_ == 1) group_ = args.batch;
  }

  // Packed B; then for each worker packed A and sums.
  int64_t bytes() const { return b_bytes() + num_threads() * worker_bytes(); }

  // Where it pays: below that, packing takes longer than multiplying saves.
  static bool preferred(const MatmulArgs& args) {
    return args.dtype == DType::kBFloat16 && args.k >= 16 &&
           args.m * args.n * args.k >= int64_t{1} << 18 && amx_available();
  }

  // store(tiles, width, matrix, first row, rows, column, columns): a column of finished sums.
  template <typename Store>
  void run(void* workspace, const Store& store) const {
    uint32_t* const packed_b = static_cast<uint32_t*>(workspace);
    char* const workers = static_cast<char*>(workspace) + b_bytes();
    const int64_t col_blocks = ceil_div(panels_, block_panels_);
    const int64_t per_matrix = ceil_div(args_.m, block_rows_) * col_blocks;
    for (int64_t first = 0; first < args_.batch; first += group_) {
      const int64_t count = std::min(group_, args_.batch - first);
      pack_b(packed_b, first, std::min(count, b_matrices_));
      for_each_task(count * per_matrix, [&](int64_t worker, int64_t task) {
        const WholeTiles tiles;
        const int64_t slot = task / per_matrix, index = task % per_matrix;
        block(packed_b + (b_matrices_ == 1 ? 0 : slot * b_size()),
              workers + worker * worker_bytes(), first + slot, index / col_blocks * block_rows_,
              index % col_blocks * block_panels_, store);
      });
    }
  }

 private:
  static constexpr int64_t kWidth = 32, kStep = 32, kDepth = 512;

  int64_t tasks() const {
    return std::min(group_, args_.batch) * ceil_div(args_.m, block_rows_) *
           ceil_div(panels_, block_panels_);
  }
  int64_t b_size() const { return panels_ * kWidth * depth_ / 2; }  // pairs of one matrix
  int64_t b_bytes() const { return std::min(group_, b_matrices_) * b_size() * 4; }
  int64_t a_bytes() const { return block_rows_ * std::min(depth_, kDepth) * 2; }
  int64_t worker_bytes() const { return a_bytes() + block_rows_ * block_panels_ * kWidth * 4; }

  // Matrices [first, first + count) of B: panels, in which rows of pairs follow each other.
  void pack_b(uint32_t* packed, int64_t first, int64_t count) const {
    parallel_for(0, count * panels_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t matrix = i / panels_, column = i % panels_ * kWidth;
        const uint16_t* const from = static_cast<const uint16_t*>(args_.b.data) +
                                     (first + matrix) * args_.b.batch + column * args_.b.col;
        pack_pairs(packed + matrix * b_size() + i % panels_ * kWidth * depth_ / 2, from,
                   std::min(kWidth, args_.n - column));
      }
    });
  }

  void pack_pairs(uint32_t* to, const uint16_t* from, int64_t columns) const {
    const int64_t row = args_.b.row, col = args_.b.col, k = args_.k;
    // What stays zero beside the columns, or below the pairs.
    std::fill(to + (columns < kWidth ? 0 : k / 2 * kWidth), to + depth_ / 2 * kWidth, 0u);
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
    float* const sums = reinterpret_cast<float*>(memory + a_bytes());
    const int64_t rows = std::min(block_rows_, args_.m - first_row), padded = round_up(rows, 16);
    const int64_t last_panel = std::min(first_panel + block_panels_, panels_);
    const uint16_t* const a = static_cast<const uint16_t*>(args_.a.data) + matrix * args_.a.batch +
                              first_row * args_.a.row;
    if (args_.k == 0) std::fill(sums, sums + (last_panel - first_panel) * padded * kWidth, 0.0f);
    for (int64_t p = 0; p < args_.k; p += kDepth) {
      const int64_t depth = std::min(kDepth, args_.k - p), width = round_up(depth, kStep);
      pack_a(packed, a + p * args_.a.col, rows, depth);
      for (int64_t j = first_panel; j < last_panel; ++j) {
        const uint32_t* const panel = b + j * kWidth * depth_ / 2 + p / 2 * kWidth;
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
  int64_t panels_, depth_;          // of 32 columns; in whole steps
  int64_t b_matrices_, group_ = 1;  // different ones; those of the batch that are packed together
  int64_t block_rows_, block_panels_;  // of C, for one task
};

#else

struct AmxMatmul {
  explicit AmxMatmul(const MatmulArgs&) {}
  int64_t bytes() const { return 0; }
  static bool preferred(const MatmulArgs&) { return false; }
  template <typename Store>
  void run(void*, const Store&) const {}
};

#endif

}  // namespace braze::cpu
