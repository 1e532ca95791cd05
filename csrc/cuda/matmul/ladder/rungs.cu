// The ladder's rungs from naive to WMMA. Those from wgmma on are in hopper_rungs.cu.
#include "rungs.h"

#include "02_coalesced.cuh"
#include "03_shared_tile.cuh"
#include "04_register_tile_1d.cuh"
#include "05_register_tile_2d.cuh"
#include "08_double_buffered.cuh"
#include "09_wmma.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr char kAll[] = "float64 float32 bfloat16 float16", kArch[] = "sm_80+";

const KernelEntry kNaive({"matmul", "01_naive", kAll, kArch, false,
                          "a thread per element of C, neighbours in a column"});
const KernelEntry kCoalesced({"matmul", "02_coalesced", kAll, kArch, false,
                              "a thread per element of C, neighbours in a row"});
const KernelEntry kSharedTile({"matmul", "03_shared_tile", kAll, kArch, false,
                               "32 x 32 tiles of A and B in shared memory"});
const KernelEntry kRegisterTile1d({"matmul", "04_register_tile_1d", kAll, kArch, false,
                                   "8 elements of a column of C in a thread"});
const KernelEntry kRegisterTile2d({"matmul", "05_register_tile_2d", kAll, kArch, false,
                                   "8 x 8 elements of C in a thread"});
const KernelEntry kVectorized({"matmul", "06_vectorized", "float32", kArch, false,
                               "16-byte loads, A transposed in shared memory"});
const KernelEntry kWarpTile({"matmul", "07_warp_tile", "float32", kArch, false,
                             "compact 32 x 64 pieces for warps"});
const KernelEntry kDoubleBuffered({"matmul", "08_double_buffered", "float32", kArch, false,
                                   "cp.async: a tile is copied while another is multiplied"});
const KernelEntry kWmma({"matmul", "09_wmma", "float32 bfloat16 float16", kArch, false,
                         "tensor cores by nvcuda::wmma; float32 as TF32"});

}  // namespace
}  // namespace braze::cuda
