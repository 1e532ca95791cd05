// Arithmetic that is written once for both devices.
#pragma once

#ifdef __CUDACC__
#define BRAZE_BOTH __host__ __device__ __forceinline__
#else
#define BRAZE_BOTH inline
#endif
