// cuBLASLt as a matmul kernel. Matrices are row-major here and column-major there: a row-major
// C = A B is the column-major C^T = B^T A^T, so A and B change places and n comes before m.
#include "libraries/libraries.h"

#ifdef BRAZE_WITH_CUBLAS

#include <cublasLt.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "launchers/common/hash_words.h"
#include "launchers/relu.h"
#include "libraries/loader.h"

namespace braze::vendor {
namespace {

// What torch gives cuBLASLt on Hopper by default.
constexpr uint64_t kMaxWorkspace = 32 << 20;
constexpr int kMaxDevices = 64;
constexpr size_t kMaxCachedPlans = 4096;  // shapes that vary without end start the cache afresh

struct Api {
  std::string missing;
  decltype(cublasLtCreate)* create;
  decltype(cublasLtGetVersion)* get_version;
  decltype(cublasLtGetStatusName)* get_status_name;
  decltype(cublasLtMatmul)* matmul;
  decltype(cublasLtMatmulAlgoGetHeuristic)* get_heuristic;
  decltype(cublasLtMatmulDescCreate)* desc_create;
  decltype(cublasLtMatmulDescDestroy)* desc_destroy;
  decltype(cublasLtMatmulDescSetAttribute)* desc_set;
  decltype(cublasLtMatrixLayoutCreate)* layout_create;
  decltype(cublasLtMatrixLayoutDestroy)* layout_destroy;
  decltype(cublasLtMatrixLayoutSetAttribute)* layout_set;
  decltype(cublasLtMatmulPreferenceCreate)* preference_create;
  decltype(cublasLtMatmulPreferenceDestroy)* preference_destroy;
  decltype(cublasLtMatmulPreferenceSetAttribute)* preference_set;

  Api() {
    void* lib = open_library("libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR), &missing);
    lib&& load_symbol(lib, "cublasLtCreate", &create, &missing) &&
        load_symbol(lib, "cublasLtGetVersion", &get_version, &missing) &&
        load_symbol(lib, "cublasLtGetStatusName", &get_status_name, &missing) &&
        load_symbol(lib, "cublasLtMatmul", &matmul, &missing) &&
        load_symbol(lib, "cublasLtMatmulAlgoGetHeuristic", &get_heuristic, &missing) &&
        load_symbol(lib, "cublasLtMatmulDescCreate", &desc_create, &missing) &&
        load_symbol(lib, "cublasLtMatmulDescDestroy", &desc_destroy, &missing) &&
        load_symbol(lib, "cublasLtMatmulDescSetAttribute", &desc_set, &missing) &&
        load_symbol(lib, "cublasLtMatrixLayoutCreate", &layout_create, &missing) &&
        load_symbol(lib, "cublasLtMatrixLayoutDestroy", &layout_destroy, &missing) &&
        load_symbol(lib, "cublasLtMatrixLayoutSetAttribute", &layout_set, &missing) &&
        load_symbol(lib, "cublasLtMatmulPreferenceCreate", &preference_create, &missing) &&
        load_symbol(lib, "cublasLtMatmulPreferenceDestroy", &preference_destroy, &missing) &&
        load_symbol(lib, "cublasLtMatmulPreferenceSetAttribute", &preference_set, &missing);
  }
};

const Api& api() {
  static const Api instance;
  return instance;
}

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw std::runtime_error(std::string("cublas: ") + what + ": " + api().get_status_name(status));
  }
}

// Owners of the three kinds of descriptor.
struct Deleter {
  void operator()(cublasLtMatmulDescOpaque_t* p) const { api().desc_destroy(p); }
  void operator()(cublasLtMatrixLayoutOpaque_t* p) const { api().layout_destroy(p); }
  void operator()(cublasLtMatmulPreferenceOpaque_t* p) const { api().preference_destroy(p); }
};
using Desc = std::unique_ptr<cublasLtMatmulDescOpaque_t, Deleter>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Deleter>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Deleter>;

template <typename T>
void set(const Desc& desc, cublasLtMatmulDescAttributes_t attribute, T value) {
  check(api().desc_set(desc.get(), attribute, &value, sizeof value), "set matmul attribute");
}

template <typename T>
void set(const Preference& p, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  check(api().preference_set(p.get(), attribute, &value, sizeof value), "set preference");
}

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return CUDA_R_64F;
    case DType::kFloat32: return CUDA_R_32F;
    case DType::kBFloat16: return CUDA_R_16BF;
    case DType::kFloat16: return CUDA_R_16F;
  }
  return CUDA_R_32F;  // not reached
}

// An r x c row-major matrix in memory is a column-major c x r one, its transpose.
struct Operand {
  bool column_major;
  int64_t ld, batch;
};

// Empty where the strides are those of no BLAS matrix: neither is 1, or rows overlap.
std::optional<Operand> as_operand(const MatrixRef& m, int64_t rows, int64_t cols, int64_t batch) {
  const int64_t batch_stride = batch > 1 ? m.batch : 0;
  // The stride of a dimension of size 1 is never used.
  if ((cols == 1 || m.col == 1) && (rows == 1 || m.row >= cols)) {
    return Operand{false, rows == 1 ? cols : m.row, batch_stride};
  }
  if ((rows == 1 || m.row == 1) && (cols == 1 || m.col >= rows)) {
    return Operand{true, cols == 1 ? rows : m.col, batch_stride};
  }
  return std::nullopt;
}

// The arguments as cuBLASLt sees them. Two rewrites put something at the workspace's front:
// k == 0 becomes the product of a column and a row of zeros; a bias aligned to less than 16 bytes,
// which the epilogues read in vectors, becomes a copy of it.
struct Problem {
  MatmulArgs args;
  Operand a, b;
  int64_t zero_bytes = 0, bias_bytes = 0;
  bool relu_after = false;  // by our own kernel

  int64_t front_bytes() const { return zero_bytes + bias_bytes; }
};

std::optional<Problem> make_problem(const MatmulArgs& args) {
  Problem p{args, {}, {}};
  MatmulArgs& q = p.args;
  if (q.k == 0) {
    q.k = 1;
    q.a = {nullptr, 0, 1, 1};
    q.b = {nullptr, 0, q.n, 1};
    p.zero_bytes = align_up(std::max(q.m, q.n) * size_of(q.dtype));
  } else if (q.batch > 1 && q.b.batch == 0 && q.a.col == 1 && q.a.batch == q.m * q.a.row) {
    // One tall matrix against one B: a single product.
    q.m *= q.batch;
    q.batch = 1;
  }
  // cuBLASLt's own ReLU turns NaN into 0 in some of its fp32 and fp16 algorithms (13.1, H200).
  p.relu_after = q.relu;
  q.relu = false;
  if (q.bias && alignment_of(q.bias, 16) < 16) p.bias_bytes = align_up(q.n * size_of(q.dtype));
  const auto a = as_operand(q.a, q.m, q.k, q.batch), b = as_operand(q.b, q.k, q.n, q.batch);
  if (!a || !b || q.batch > INT32_MAX) return std::nullopt;
  p.a = *a;
  p.b = *b;
  return p;
}

// Everything about a problem but its pointers. Immutable once built.
struct Plan {
  Desc desc;  // without a bias, whose pointer would be part of it
  Layout a, b, c;
  std::vector<cublasLtMatmulHeuristicResult_t> algos;  // best first
};

Layout make_layout(cudaDataType_t type, uint64_t rows, uint64_t cols, int64_t ld, int64_t batch,
                   int64_t batch_stride) {
  cublasLtMatrixLayout_t raw = nullptr;
  check(api().layout_create(&raw, type, rows, cols, ld), "create layout");
  Layout layout(raw);
  const int32_t count = static_cast<int32_t>(batch);
  check(api().layout_set(raw, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count), "batch");
  check(api().layout_set(raw, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride,
                         sizeof batch_stride),
        "batch stride");
  return layout;
}

Desc make_desc(const Problem& p, const void* bias) {
  const MatmulArgs& args = p.args;
  const bool fp64 = args.dtype == DType::kFloat64;
  const cublasComputeType_t compute = fp64 ? CUBLAS_COMPUTE_64F
                                      : args.dtype == DType::kFloat32 && args.allow_tf32
                                          ? CUBLAS_COMPUTE_32F_FAST_TF32
                                          : CUBLAS_COMPUTE_32F;
  cublasLtMatmulDesc_t raw = nullptr;
  check(api().desc_create(&raw, compute, fp64 ? CUDA_R_64F : CUDA_R_32F), "create matmul");
  Desc desc(raw);
  // B^T is the first factor. A column-major B has to be transposed to be B^T, a row-major one is.
  if (p.b.column_major) set(desc, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  if (p.a.column_major) set(desc, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_T);
  if (bias) {
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
  return desc;
}

cublasLtHandle_t handle_of(int device) {
  static std::mutex mutex;
  static cublasLtHandle_t handles[kMaxDevices] = {};
  const std::lock_guard<std::mutex> lock(mutex);
  if (!handles[device]) {
    const AllowSetupInCapture allow;
    check(api().create(&handles[device]), "create handle");
  }
  return handles[device];
}

Plan make_plan(const Problem& p, int device, int wanted) {
  const MatmulArgs& args = p.args;
  const cudaDataType_t type = data_type(args.dtype);
  const auto layout = [&](const Operand& o, int64_t rows, int64_t cols) {
    return o.column_major ? make_layout(type, rows, cols, o.ld, args.batch, o.batch)
                          : make_layout(type, cols, rows, o.ld, args.batch, o.batch);
  };
  Plan plan{make_desc(p, nullptr),
            layout(p.a, args.m, args.k),
            layout(p.b, args.k, args.n),
            make_layout(type, args.n, args.m, args.n, args.batch, args.m * args.n),
            {}};

  cublasLtMatmulPreference_t raw = nullptr;
  check(api().preference_create(&raw), "create preference");
  const Preference preference(raw);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMaxWorkspace);
  const auto alignment = [](const void* ptr) {
    return static_cast<uint32_t>(alignment_of(ptr, kWorkspaceAlignment));
  };
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(args.b.data));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(args.a.data));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(args.c));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(args.c));
  // Split-K only where partial sums are kept in the compute type and added in a fixed order.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));

  // Never dereferenced here; its alignment counts.
  const void* bias = !p.args.bias ? nullptr : reinterpret_cast<const void*>(kWorkspaceAlignment);
  const Desc desc = make_desc(p, bias);
  plan.algos.resize(wanted);
  int found = 0;
  const cublasStatus_t status =
      api().get_heuristic(handle_of(device), desc.get(), plan.b.get(), plan.a.get(), plan.c.get(),
                          plan.c.get(), preference.get(), wanted, plan.algos.data(), &found);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "heuristic");
  plan.algos.resize(status == CUBLAS_STATUS_SUCCESS ? found : 0);
  const auto failed = [](const auto& algo) { return algo.state != CUBLAS_STATUS_SUCCESS; };
  plan.algos.erase(std::remove_if(plan.algos.begin(), plan.algos.end(), failed), plan.algos.end());
  return plan;
}

// The cached plan. Asking for one algorithm is cheaper than for all, so the favourite has a plan of
// its own.
std::shared_ptr<const Plan> plan_for(const Problem& p, int candidate) {
  using Key = std::array<int64_t, 19>;
  static std::mutex mutex;
  // Never destroyed: the library may be gone when static objects are.
  static auto& cache = *new std::unordered_map<Key, std::shared_ptr<const Plan>, HashWords>;
  const MatmulArgs& q = p.args;
  const int device = current_device();
  const Key key = {device,
                   candidate > 0,
                   static_cast<int64_t>(q.dtype),
                   q.batch,
                   q.m,
                   q.n,
                   q.k,
                   p.a.column_major,
                   p.a.ld,
                   p.a.batch,
                   p.b.column_major,
                   p.b.ld,
                   p.b.batch,
                   q.bias != nullptr,
                   q.relu,
                   q.dtype == DType::kFloat32 && q.allow_tf32,
                   alignment_of(q.a.data, kWorkspaceAlignment),
                   alignment_of(q.b.data, kWorkspaceAlignment),
                   alignment_of(q.c, kWorkspaceAlignment)};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = cache.find(key);
  if (found != cache.end()) return found->second;
  if (cache.size() >= kMaxCachedPlans) cache.clear();
  auto plan =
      std::make_shared<const Plan>(make_plan(p, device, candidate > 0 ? kMaxCandidates : 1));
  cache.emplace(key, plan);
  return plan;
}

bool is_empty(const MatmulArgs& args) { return args.batch == 0 || args.m == 0 || args.n == 0; }

bool has(const Plan& plan, int candidate) {
  return candidate >= 0 && candidate < static_cast<int>(plan.algos.size());
}

}  // namespace

const std::string& cublas_missing() { return api().missing; }

std::string cublas_version() {
  return api().missing.empty() ? dotted_version(api().get_version()) : "";
}

std::optional<int64_t> cublas_plan(const MatmulArgs& args, int candidate) {
  if (!cublas_missing().empty() || args.has_more_than_residual()) return std::nullopt;
  // Algorithms are asked for as for fresh memory.
  if (reinterpret_cast<uintptr_t>(args.residual) % 256 != 0) return std::nullopt;
  if (is_empty(args)) return 0;
  const auto problem = make_problem(args);
  if (!problem) return std::nullopt;
  const auto plan = plan_for(*problem, candidate);
  if (!has(*plan, candidate)) return std::nullopt;
  return problem->front_bytes() + static_cast<int64_t>(plan->algos[candidate].workspaceSize);
}

void cublas_matmul(Stream stream, const MatmulArgs& args, void* workspace, int candidate) {
  if (!cublas_missing().empty()) throw std::runtime_error("cublas: " + cublas_missing());
  if (is_empty(args)) return;
  const auto problem = make_problem(args);
  if (!problem) {
    throw std::runtime_error("cublas: expected matrices with a stride of 1 and disjoint rows");
  }
  const auto plan = plan_for(*problem, candidate);
  if (!has(*plan, candidate)) {
    throw std::runtime_error("cublas: no algorithm number " + std::to_string(candidate) +
                             " for this problem");
  }
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const MatmulArgs& q = problem->args;
  char* const front = static_cast<char*>(workspace);
  const void *a = q.a.data, *b = q.b.data, *bias = q.bias;
  if (problem->zero_bytes) {
    check_cuda(cudaMemsetAsync(front, 0, problem->zero_bytes, cuda_stream), "cublas: zeros");
    a = b = front;
  }
  if (problem->bias_bytes) {
    char* const copy = front + problem->zero_bytes;
    check_cuda(
        cudaMemcpyAsync(copy, bias, q.n * size_of(q.dtype), cudaMemcpyDeviceToDevice, cuda_stream),
        "cublas: bias");
    bias = copy;
  }
  const Desc biased = bias ? make_desc(*problem, bias) : nullptr;
  const auto& algo = plan->algos[candidate];
  const double one64 = 1, beta64 = q.residual ? 1 : 0;
  const float one32 = 1, beta32 = q.residual ? 1 : 0;
  const bool fp64 = q.dtype == DType::kFloat64;
  check(api().matmul(handle_of(current_device()), bias ? biased.get() : plan->desc.get(),
                     fp64 ? static_cast<const void*>(&one64) : &one32, b, plan->b.get(), a,
                     plan->a.get(), fp64 ? static_cast<const void*>(&beta64) : &beta32,
                     q.residual ? q.residual : q.c, plan->c.get(), q.c, plan->c.get(), &algo.algo,
                     algo.workspaceSize ? front + problem->front_bytes() : nullptr,
                     algo.workspaceSize, cuda_stream),
        "matmul");
  if (problem->relu_after) cuda::relu(stream, q.dtype, q.c, q.c, q.batch * q.m * q.n);
}

}  // namespace braze::vendor

#else  // built without cublasLt.h

namespace braze::vendor {

const std::string& cublas_missing() {
  static const std::string reason =
      "braze was built without cublasLt.h: pip install --no-deps -r requirements-build-cuda12.txt "
      "(or 13), "
      "then build again";
  return reason;
}
std::string cublas_version() { return ""; }
std::optional<int64_t> cublas_plan(const MatmulArgs&, int) { return std::nullopt; }
void cublas_matmul(Stream, const MatmulArgs&, void*, int) {
  throw std::runtime_error("cublas: " + cublas_missing());
}

}  // namespace braze::vendor

#endif
