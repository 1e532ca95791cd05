// Launches dmma_tma.cuh.
#include "dmma_tma.cuh"

#include "cuda/matmul/gemm_plan.cuh"
#include "cuda/matmul/hopper/hopper.h"
#include "cuda/matmul/hopper/launch.cuh"
#include "cuda/matmul/obstacles.h"

namespace braze::cuda::hopper {
namespace {

int64_t tiles_of(const MatmulArgs& p) {
  return p.batch * ceil_div(p.m, DmmaTile::kM) * ceil_div(p.n, DmmaTile::kN);
}

template <bool kAMnMajor, bool kBMnMajor>
void launch(Stream stream, const DmmaProblem& problem, unsigned blocks, const CUtensorMap& a_map,
            const CUtensorMap& b_map) {
  constexpr auto kKernel = dmma_tma_kernel<kAMnMajor, kBMnMajor>;
  static std::atomic<uint64_t> done{0};
  allow_shared_memory(reinterpret_cast<const void*>(kKernel), DmmaTile::kSharedBytes, done);
  launch_early(kKernel, blocks, DmmaTile::kThreads, DmmaTile::kSharedBytes, stream, a_map, b_map,
               problem);
  check_launch("matmul dmma_tma");
}

}  // namespace

const char* dmma_tma_obstacle(const MatmulArgs& p) {
  if (p.dtype != DType::kFloat64) return "it takes float64";
  if (const char* why = too_large(p)) return why;
  if (!has_wgmma()) return kNeedsHopper;
  if (p.k == 0) return "there is nothing to multiply";
  return tma_takes(operand_a(p), sizeof(double)) && tma_takes(operand_b(p), sizeof(double))
             ? nullptr
             : "its operands have one stride of 1, others even, and are aligned to 16 bytes";
}

// Where tiles fill the device for most of the time.
bool dmma_tma_preferred(const MatmulArgs& p) {
  const int64_t tiles = tiles_of(p), slots = ceil_div(tiles, sm_count()) * sm_count();
  return p.k >= 128 && 4 * tiles >= 3 * slots;
}

void dmma_tma_matmul(Stream stream, const MatmulArgs& p) {
  const Operand a = operand_a(p), b = operand_b(p);
  DmmaProblem problem = matmul_problem<double>(p);
  const unsigned blocks = problem.set_tiles<DmmaTile::kM, DmmaTile::kN, DmmaTile::kDepth>(1);
  const CUtensorMap a_map = operand_map<double>(a, p.k, p.batch, 16);
  const CUtensorMap b_map = operand_map<double>(b, p.k, p.batch, 16);
  const auto run = [&](auto a_mn_major, auto b_mn_major) {
    launch<a_mn_major.value, b_mn_major.value>(stream, problem, blocks, a_map, b_map);
  };
  if (a.mn_major()) {
    return b.mn_major() ? run(std::true_type{}, std::true_type{})
                        : run(std::true_type{}, std::false_type{});
  }
  b.mn_major() ? run(std::false_type{}, std::true_type{})
               : run(std::false_type{}, std::false_type{});
}

}  // namespace braze::cuda::hopper
