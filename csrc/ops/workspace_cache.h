// Memory that the CPU's launchers work in, kept from call to call.
#pragma once

#include <cstdint>

namespace braze {

// A piece of memory of the calling thread's cache.
struct WorkspaceBlock {
  void* data = nullptr;
  int64_t bytes = 0;
};

// What a thread keeps at most, in as many blocks: as a convolution's backward has on loan at the
// same time, the gradient of its result and a workspace for each of its two passes. The rest goes
// back to the system at once, all of it when the thread ends.
constexpr int64_t kKeptWorkspaceBytes = int64_t{64} << 20, kKeptWorkspaces = 3;

// A block of `bytes` or more, of the cache where it has one: fresh memory costs a page fault for
// each page, which for a kernel of some milliseconds is as long again, and pages of another place
// in each process. Throws std::runtime_error where memory is lacking.
WorkspaceBlock borrow_workspace(int64_t bytes);
void give_back_workspace(WorkspaceBlock block);
// What the calling thread keeps, in bytes.
int64_t kept_workspace_bytes();

}  // namespace braze
