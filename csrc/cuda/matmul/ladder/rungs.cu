// Compiles the ladder's rungs from naive to WMMA. Those from wgmma on are in hopper_rungs.cu.
#include "rungs.h"

#include "02_coalesced.cuh"
#include "03_shared_tile.cuh"
#include "04_register_tile_1d.cuh"
#include "05_register_tile_2d.cuh"
#include "08_double_buffered.cuh"
#include "09_wmma.cuh"
