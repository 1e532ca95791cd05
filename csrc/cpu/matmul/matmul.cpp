// Matrix product: the operands packed into panels (gemm.h), blocked for the second-level cache,
// after K. Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication" (2008).
// The rungs below it are in matmul_rungs.h.
#include "launchers/column_sum.h"
#include "launchers/matmul.h"

#include <algorithm>

#include "cpu/matmul/epilogue.h"
#include "cpu/matmul/few_rows.h"
#include "cpu/matmul/gemm.h"
#include "cpu/matmul/matmul_pairs.h"
#include "cpu/matmul/matmul_rungs.h"
#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

// A block of C that one task computes: at most 96 rows, so that its panel of A (96 KiB at depth
// 256) stays in the second-level cache, by at most 768 columns (288 KiB of accumulators).
constexpr int64_t kMaxBlockRows = 96, kMaxBlockCols = 768;
// Multiply-adds that one thread has done before another would have woken up.
constexpr int64_t kSerialWork = 1 << 18;
// Rows of A up to which a panel of B is not read often enough for packing it to pay, where its rows
// lie side by side already.
constexpr int64_t kUnpackedRows = 128;
// Elements by which regions of the workspace are aligned: a cache line of fp32.
constexpr int64_t kAlign = 16;

// How the work is cut, and the sizes, in elements of the accumulation type, of what is packed.
template <typename Acc>
struct Plan {
  explicit Plan(const MatmulArgs& args)
      : rows(panel_rows(args.m)),
        panels(args.n),
        in_place(args.dtype == DType::kFloat32 || args.dtype == DType::kFloat64),
        first_packed(in_place && args.b.col == 1 && args.m <= kUnpackedRows ? whole_panels(args)
                                                                            : 0),
        b_size(round_up(args.k * (panels.padded() - panels.begin(first_packed)), kAlign)),
        b_matrices(args.b.batch == 0 ? 1 : args.batch),
        group(std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(1, b_size * sizeof(Acc)), 1,
                                  std::max<int64_t>(1, args.batch))),
        block_rows(std::min(kMaxBlockRows, round_up(args.m, rows))),
        block_panels(
            std::min(std::max<int64_t>(1, kMaxBlockCols / kMaxPanelWidth<Acc>), panels.count())) {
    // Several tasks for each thread, as long as blocks stay worth packing for.
    const int64_t wanted = 4 * num_threads();
    if (num_threads() > 1 && args.batch * args.m * args.n * args.k > kSerialWork) {
      while (tasks(args) < wanted && block_rows > 4 * kRows) {
        block_rows = round_up(block_rows / 2, kRows);
      }
      while (tasks(args) < wanted && block_panels > 2) block_panels = (block_panels + 1) / 2;
    }
    if (b_matrices == 1) group = args.batch;
    a_size = block_rows * std::min(args.k, kDepth);
    const int64_t tiles = block_rows * block_panels * kMaxPanelWidth<Acc>;
    scratch = round_up(a_size + tiles, kAlign);
  }
  // Panels without padding: all, or all but the last one.
  int64_t whole_panels(const MatmulArgs& args) const {
    return panels.count() - (panels.padded() != args.n);
  }
  int64_t row_blocks(const MatmulArgs& args) const { return ceil_div(args.m, block_rows); }
  int64_t col_blocks() const { return ceil_div(panels.count(), block_panels); }
  int64_t tasks(const MatmulArgs& args) const {
    return std::min(group, args.batch) * row_blocks(args) * col_blocks();
  }
  int64_t packed_b() const { return std::min(group, b_matrices) * b_size; }
  int64_t bytes() const { return (packed_b() + num_threads() * scratch) * sizeof(Acc); }

  int rows;  // of a panel of A
  Panels<Acc> panels;
  bool in_place;                     // elements are of the accumulation type
  int64_t first_packed;              // panels of B before it are read where they are
  int64_t b_size, b_matrices;        // one packed matrix; how many different ones there are
  int64_t group;                     // matrices of the batch that are worked on together
  int64_t block_rows, block_panels;  // of C, for one task
  int64_t a_size, scratch;           // packed A; all memory of one worker
};

// The epilogue: `rows` by `columns` sums, rows `width` apart, to C[matrix] at (first_row, column).
template <typename T>
void store_columns(const MatmulArgs& args, acc_t<T>* sums, int64_t width, int64_t matrix,
                   int64_t first_row, int64_t rows, int64_t column, int64_t columns) {
  using Acc = acc_t<T>;
  constexpr int64_t kMostColumns = 64;
  static_assert(kMaxPanelWidth<Acc> <= kMostColumns);
  Acc bias[kMostColumns] = {};
  const T* given = static_cast<const T*>(args.bias) + column;
  for (int64_t j = 0; args.bias && j < columns; ++j) bias[j] = Acc(given[j]);
  const int64_t row = matrix * args.m + first_row;
  if (changes_values(args)) {
    for (int64_t i = 0; i < rows; ++i) {
      Acc* tile = sums + i * width;
      for (int64_t j = 0; j < columns; ++j) tile[j] += bias[j];
      finish_row<T>(args, tile, row + i, column, columns);
    }
    return;
  }
  T* c = static_cast<T*>(args.c) + row * args.n + column;
  for (int64_t i = 0; i < rows; ++i, c += args.n) {
    const Acc* tile = sums + i * width;
    for (int64_t j = 0; j < columns; ++j) c[j] = relu_if<T>(args.relu, tile[j] + bias[j]);
  }
}

template <typename T>
struct Blocked {
  using Acc = acc_t<T>;
  const MatmulArgs& args;
  const Plan<Acc>& plan;
  Acc* packed_b;
  Acc* scratch;

  Blocked(const MatmulArgs& args, const Plan<Acc>& plan, void* workspace)
      : args(args),
        plan(plan),
        packed_b(static_cast<Acc*>(workspace)),
        scratch(packed_b + plan.packed_b()) {}

  void run() const {
    for (int64_t first = 0; first < args.batch; first += plan.group) {
      const int64_t count = std::min(plan.group, args.batch - first);
      pack_b(first, std::min(count, plan.b_matrices));
      const int64_t per_matrix = plan.row_blocks(args) * plan.col_blocks();
      for_each_task(count * per_matrix, [&](int64_t worker, int64_t task) {
        block(scratch + worker * plan.scratch, task / per_matrix, first + task / per_matrix,
              task % per_matrix);
      });
    }
  }

  // Matrices [first, first + count) of B, each as one panel after the other.
  void pack_b(int64_t first, int64_t count) const {
    const int64_t panels = plan.panels.count() - plan.first_packed;
    const int64_t depths = ceil_div(args.k, kDepth), per_matrix = panels * depths;
    const T* b = static_cast<const T*>(args.b.data);
    const int64_t piece = std::max<int64_t>(1, std::min(args.k, kDepth) * kMaxPanelWidth<Acc>);
    parallel_for(0, count * per_matrix, ceil_div(16384, piece), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t matrix = i / per_matrix, j = plan.first_packed + i % per_matrix / depths;
        const int64_t p = i % depths * kDepth, width = plan.panels.width(j);
        pack_panel(packed_panel(matrix, j) + p * width, width,
                   b + (first + matrix) * args.b.batch + plan.panels.begin(j) * args.b.col +
                       p * args.b.row,
                   args.b.col, args.b.row, plan.panels.columns(j), std::min(kDepth, args.k - p));
      }
    });
  }

  Acc* packed_panel(int64_t slot, int64_t j) const {
    const int64_t columns = plan.panels.begin(j) - plan.panels.begin(plan.first_packed);
    return packed_b + slot * plan.b_size + columns * args.k;
  }

  // Panel j of B from row p on, and the panel `next` from row `next_p` on that comes after it.
  ColumnPanel<Acc> panel_of_b(int64_t slot, int64_t matrix, int64_t j, int64_t p, int64_t next,
                              int64_t next_p) const {
    const int64_t width = plan.panels.width(j);
    if constexpr (std::is_same_v<T, Acc>) {
      if (j < plan.first_packed) {
        const T* b = static_cast<const T*>(args.b.data) + matrix * args.b.batch;
        return {b + p * args.b.row + plan.panels.begin(j), args.b.row, plan.panels.vecs(j)};
      }
    }
    if (plan.b_matrices == 1) slot = 0;
    ColumnPanel<Acc> panel{packed_panel(slot, j) + p * width, width, plan.panels.vecs(j)};
    if (next >= plan.first_packed && next_p < args.k) {
      panel.next = packed_panel(slot, next) + next_p * plan.panels.width(next);
      panel.next_size = std::min(kDepth, args.k - next_p) * plan.panels.width(next);
    }
    return panel;
  }

  // Whether panel j of C needs neither further sums nor an epilogue, nor has it padding.
  bool stores_to_c(int64_t j) const {
    return plan.in_place && args.k > 0 && args.k <= kDepth && !args.bias && !args.relu &&
           !changes_values(args) && j < plan.whole_panels(args);
  }

  // Block `index` of C[matrix]; `slot` is the matrix's place in its group.
  void block(Acc* packed_a, int64_t slot, int64_t matrix, int64_t index) const {
    const int64_t first_row = index / plan.col_blocks() * plan.block_rows;
    const int64_t rows = std::min(plan.block_rows, args.m - first_row);
    const int64_t row_panels = ceil_div(rows, plan.rows), whole_row_panels = rows / plan.rows;
    const int64_t first_panel = index % plan.col_blocks() * plan.block_panels;
    const int64_t last_panel = std::min(first_panel + plan.block_panels, plan.panels.count());
    const T* a =
        static_cast<const T*>(args.a.data) + matrix * args.a.batch + first_row * args.a.row;
    Acc* tiles = packed_a + plan.a_size;
    const int64_t tile_panel = row_panels * plan.rows * kMaxPanelWidth<Acc>;

    if (args.k == 0) std::fill(tiles, tiles + (last_panel - first_panel) * tile_panel, Acc(0));
    for (int64_t p = 0; p < args.k; p += kDepth) {
      const int64_t depth = std::min(kDepth, args.k - p);
      for (int64_t i = 0; i < row_panels; ++i) {
        const int64_t row = i * plan.rows;
        pack_panel(packed_a + row * depth, plan.rows, a + row * args.a.row + p * args.a.col,
                   args.a.row, args.a.col, std::min<int64_t>(plan.rows, rows - row), depth);
      }
      for (int64_t j = first_panel; j < last_panel; ++j) {
        // After the last panel at this depth comes the first one below it.
        const bool last = j + 1 == last_panel;
        const auto b =
            panel_of_b(slot, matrix, j, p, last ? first_panel : j + 1, last ? p + depth : p);
        const int64_t width = plan.panels.width(j), direct = stores_to_c(j) ? whole_row_panels : 0;
        if (direct) {
          Acc* c = static_cast<Acc*>(args.c) + (matrix * args.m + first_row) * args.n;
          multiply_panels(depth, packed_a, plan.rows, direct, b,
                          {c + plan.panels.begin(j), args.n, plan.rows * args.n}, false);
        }
        multiply_panels(depth, packed_a + direct * plan.rows * depth, plan.rows,
                        row_panels - direct, b,
                        {tiles + (j - first_panel) * tile_panel + direct * plan.rows * width, width,
                         plan.rows * width},
                        p > 0);
      }
    }
    for (int64_t j = first_panel; j < last_panel; ++j) {
      const int64_t width = plan.panels.width(j);
      const int64_t done = stores_to_c(j) ? whole_row_panels * plan.rows : 0;
      store_columns<T>(args, tiles + (j - first_panel) * tile_panel + done * width, width, matrix,
                       first_row + done, rows - done, plan.panels.begin(j), plan.panels.columns(j));
    }
  }
};

int64_t acc_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

const char* no_obstacle(const MatmulArgs&) { return nullptr; }
const char* amx_obstacle(const MatmulArgs& args) {
  return args.dtype == DType::kBFloat16 && amx_available()
             ? nullptr
             : "amx takes bfloat16, on a processor and a system with AMX";
}
const char* dot_bf16_obstacle(const MatmulArgs& args) {
  return args.dtype == DType::kBFloat16 && dot_bf16_available()
             ? nullptr
             : "dot_bf16 takes bfloat16, on a processor with AVX512_BF16";
}

void plan_naive(const MatmulArgs&, MatmulPlan*) {}
void plan_reordered(const MatmulArgs& args, MatmulPlan* plan) {
  plan->workspace_bytes = args.n * acc_size(args.dtype);
}
template <typename Tiling>
void plan_as(const MatmulArgs& args, MatmulPlan* plan) {
  const Tiling tiling(args);
  plan->workspace_bytes = tiling.bytes();
  plan->tiling.set(tiling);
}
void plan_blocked(const MatmulArgs& args, MatmulPlan* plan) {
  if (few_rows_of(args) != FewRows::kNone) return;
  return args.dtype == DType::kFloat64 ? plan_as<Plan<double>>(args, plan)
                                       : plan_as<Plan<float>>(args, plan);
}

void run_naive(const MatmulArgs& args, const MatmulPlan&, void*) {
  dispatch(args.dtype, [&](auto tag) { naive_matmul<typename decltype(tag)::type>(args); });
}
void run_reordered(const MatmulArgs& args, const MatmulPlan&, void* workspace) {
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    reordered_matmul<T>(args, static_cast<acc_t<T>*>(workspace));
  });
}
// Whether the product is one of few_rows.h, which has been made then.
template <typename T>
bool run_few_rows(const MatmulArgs& args) {
  const auto store = [&](T* sums, int64_t width, int64_t matrix, int64_t row, int64_t rows,
                         int64_t column, int64_t columns) {
    store_columns<T>(args, sums, width, matrix, row, rows, column, columns);
  };
  switch (few_rows_of(args)) {
    case FewRows::kDots: return few_rows_by_dots<T>(args, store), true;
    case FewRows::kStripes: return few_rows_by_stripes<T>(args, store), true;
    case FewRows::kOuter: return few_depths_by_rows<T>(args, store), true;
    case FewRows::kNone: break;
  }
  return false;
}
void run_blocked(const MatmulArgs& args, const MatmulPlan& plan, void* workspace) {
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, acc_t<T>>) {
      if (run_few_rows<T>(args)) return;
    }
    Blocked<T>(args, plan.tiling.get<Plan<acc_t<T>>>(), workspace).run();
  });
}
template <typename Unit>
void run_pairs(const MatmulArgs& args, const MatmulPlan& plan, void* workspace) {
  const auto store = [&](float* sums, int64_t width, int64_t matrix, int64_t row, int64_t rows,
                         int64_t column, int64_t columns) {
    if (!std::is_same_v<Unit, DotProducts> || args.relu || changes_values(args)) {
      return store_columns<BFloat16>(args, sums, width, matrix, row, rows, column, columns);
    }
    float bias[PairPlan<Unit>::kWidth] = {};
    const BFloat16* const given = static_cast<const BFloat16*>(args.bias);
    for (int64_t j = 0; given && j < columns; ++j) bias[j] = given[column + j];
    BFloat16* const c = static_cast<BFloat16*>(args.c) + (matrix * args.m + row) * args.n + column;
    store_rounded(sums, width, rows, columns, bias, c, args.n);
  };
  PairMatmul<Unit>(args, plan.tiling.get<PairPlan<Unit>>()).run(workspace, store);
}

struct Kernel {
  KernelInfo info;
  const char* (*obstacle)(const MatmulArgs&);
  void (*plan)(const MatmulArgs&, MatmulPlan*);
  void (*run)(const MatmulArgs&, const MatmulPlan&, void* workspace);
};

constexpr char kAll[] = "float64 float32 bfloat16 float16";
constexpr Kernel kKernels[] = {
    {{"matmul", "01_naive", kAll, "cpu", false, "triple loop"}, no_obstacle, plan_naive, run_naive},
    {{"matmul", "02_reordered", kAll, "cpu", false, "the inner loop along rows of B"},
     no_obstacle,
     plan_reordered,
     run_reordered},
    {{"matmul", "blocked", kAll, "cpu", true,
      "packed panels, register tiles, cache blocks, threads"},
     no_obstacle,
     plan_blocked,
     run_blocked},
    {{"matmul", "dot_bf16", "bfloat16", "cpu", true,
      "vectors of pairs: packed panels, cache blocks, threads"},
     dot_bf16_obstacle,
     plan_as<PairPlan<DotProducts>>,
     run_pairs<DotProducts>},
    {{"matmul", "amx", "bfloat16", "cpu", true,
      "tile registers: packed panels, cache blocks, threads"},
     amx_obstacle,
     plan_as<PairPlan<AmxTiles>>,
     run_pairs<AmxTiles>},
};
constexpr int kBlocked = kernel_number(kKernels, "blocked");
constexpr int kDotBf16 = kernel_number(kKernels, "dot_bf16");
constexpr int kAmx = kernel_number(kKernels, "amx");
// The last two are listed where the machine has them: none has AMX alone.
const int kCount = static_cast<int>(std::size(kKernels)) - !amx_available() - !dot_bf16_available();
const KernelEntries kEntries(kKernels, kCount);

}  // namespace

const KernelInfo* matmul_kernel(int number) {
  return number < kCount ? &kKernels[number].info : nullptr;
}

MatmulPlan plan_matmul(const MatmulArgs& args, int kernel) {
  MatmulPlan plan;
  plan.kernel = kernel != kAnyKernel                     ? kernel
                : PairPlan<AmxTiles>::preferred(args)    ? kAmx
                : PairPlan<DotProducts>::preferred(args) ? kDotBf16
                                                         : kBlocked;
  plan.obstacle = kKernels[plan.kernel].obstacle(args);
  if (!plan.obstacle) kKernels[plan.kernel].plan(args, &plan);
  // The sums are taken from C when it is done: the same memory serves again.
  const int64_t sums =
      args.column_sums ? column_sum_parts(args.m) * args.n * acc_size(args.dtype) : 0;
  plan.workspace_bytes = std::max(sums, plan.workspace_bytes);
  return plan;
}

void run_matmul(Stream, const MatmulArgs& args, const MatmulPlan& plan, void* workspace) {
  kKernels[plan.kernel].run(args, plan, workspace);
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* c = static_cast<const T*>(args.c);
    if (args.column_sums) {
      sum_columns(args.m, args.n, static_cast<acc_t<T>*>(workspace),
                  static_cast<T*>(args.column_sums),
                  [&](int64_t begin, int64_t) { return c + begin * args.n; });
    }
    if (args.row_sums) sum_rows(args.m, args.n, c, static_cast<T*>(args.row_sums));
  });
}

int64_t column_sum_workspace_bytes(const ColumnSumArgs& args) {
  if (!args.out) return 0;
  return column_sum_parts(args.m) * args.n * acc_size(args.dtype);
}

void column_sum(Stream stream, const ColumnSumArgs& args, void* workspace) {
  begin_column_sum(stream, args, workspace);
}

// All of it: there is one stream.
void finish_column_sum(Stream, const ColumnSumArgs&, void*) {}
void begin_column_sum(Stream, const ColumnSumArgs& args, void* workspace) {
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Acc = acc_t<T>;
    const int64_t n = args.n;
    sum_columns(args.m, n, static_cast<Acc*>(workspace), static_cast<T*>(args.out),
                [&](int64_t begin, int64_t end) {
                  const T* in = static_cast<const T*>(args.x);
                  if (!args.result) return in + begin * n;
                  const T* __restrict__ x = in;
                  const T* __restrict__ result = static_cast<const T*>(args.result);
                  T* __restrict__ masked = static_cast<T*>(args.masked);
                  for (int64_t i = begin * n; i < end * n; ++i) {
                    masked[i] = static_cast<Acc>(result[i]) <= Acc(0) ? T(0) : x[i];  // NaN passes
                  }
                  return static_cast<const T*>(masked) + begin * n;
                });
  });
}

// A launch costs nothing here.
bool linear_gradients(Stream, const LinearGradArgs&) { return false; }

}  // namespace braze::cpu
