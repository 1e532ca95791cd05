#pragma once

#include <cstdint>

#include "ops/tuned.h"

#define BRAZE_EXPORT __attribute__((visibility("default")))

struct BrazeDeviceAttributes {
  int64_t sm_count;
  int64_t sm_clock_khz;
  int64_t memory_clock_khz;
  int64_t memory_bus_bits;
  int64_t l2_bytes;
  int64_t shared_bytes_per_block;
};

// A table of ops/tuned.h for Python. `problem` points to as many words as its problems have.
struct BrazeTuning {
  int words;
  void (*set)(const int64_t* problem, const char* choice, int measured);
  void (*clear)();
  void (*for_each)(braze::VisitChoice* visit, void* state);
  void (*record)(int on);
  void (*for_each_recorded)(braze::VisitProblem* visit, void* state);
};

struct BrazeVendorLibrary {
  const char* name;     // as in braze.backend(matmul=name)
  const char* version;  // empty where it is missing
  const char* missing;  // why, or empty
};
