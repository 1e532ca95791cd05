// Vendor libraries behind the launchers' own signatures. They are loaded at run time (the copies
// that torch has loaded); none is linked, and a missing one disables only its backend.
#pragma once

#include <optional>
#include <string>

#include "launchers/conv2d.h"
#include "launchers/matmul.h"

namespace braze::vendor {

// Why cuBLASLt (cuDNN) cannot be used here, or an empty string where it can.
const std::string& cublas_missing();
const std::string& cudnn_missing();

// The loaded library's version, "13.1.0", or an empty string where it is missing.
std::string cublas_version();
std::string cudnn_version();

// Each library offers several algorithms for a problem, its own favourite first. A backend string
// names one of them: "cublas" and "cublas:0" the favourite, "cublas:3" the fourth. Returns that
// number, or -1 where `backend` is not `vendor` ("cublas" or "cudnn") with or without a number.
int candidate_of(const std::string& backend, const char* vendor);
constexpr int kMaxCandidates = 32;

// All functions below work on the current device, never synchronise, and may be called while a CUDA
// graph is captured. Workspaces are aligned to 256 bytes.

// Bytes of workspace that cuBLASLt wants for these arguments, or nothing where it does not take
// them (dtype, strides, and for candidate > 0 has so many).
std::optional<int64_t> cublas_plan(const MatmulArgs& args, int candidate = 0);
void cublas_matmul(Stream stream, const MatmulArgs& args, void* workspace, int candidate = 0);

// The same for cuDNN and a pass. Plans are cached per shape, layout and device; the first call for
// a new one builds it, which may take long. Fprop may fuse a bias (k values); many engines cannot,
// so a caller adds it by itself where there is only a plan without.
std::optional<int64_t> cudnn_plan(const Conv2dProblem& problem, const void* bias = nullptr,
                                  int candidate = 0);
void cudnn_conv2d(Stream stream, const Conv2dProblem& problem, void* workspace,
                  const void* bias = nullptr, int candidate = 0);

}  // namespace braze::vendor
