#pragma once

#include <cstdint>

#define BRAZE_EXPORT __attribute__((visibility("default")))

struct BrazeDeviceAttributes {
  int64_t sm_count;
  int64_t sm_clock_khz;
  int64_t memory_clock_khz;
  int64_t memory_bus_bits;
  int64_t l2_bytes;
  int64_t shared_bytes_per_block;
};

struct BrazeVendorLibrary {
  const char* name;     // as in braze.backend(matmul=name)
  const char* version;  // empty where it is missing
  const char* missing;  // why, or empty
};
