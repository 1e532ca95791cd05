#include "ops/workspace_cache.h"

#ifndef BRAZE_CUDA

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/huge_pages.h"

namespace braze {
namespace {

constexpr int64_t kPage = 4096, kHugePage = int64_t{2} << 20;

WorkspaceBlock allocate(int64_t bytes) {
  const int64_t page = bytes >= kHugePageBytes ? kHugePage : kPage;
  const int64_t size = (bytes + page - 1) / page * page;
  void* const data = std::aligned_alloc(page, size);
  if (!data) {
    throw std::runtime_error("braze: no memory for a workspace of " + std::to_string(size) +
                             " bytes");
  }
  if (page == kHugePage) prefer_huge_pages(data, size);
  return {data, size};
}

// Blocks that nobody uses, the one that was used last at the end.
struct Cache {
  Cache() { free.reserve(kKeptWorkspaces + 1); }
  ~Cache() {
    for (const WorkspaceBlock& block : free) std::free(block.data);
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const WorkspaceBlock& block : free) sum += block.bytes;
    return sum;
  }

  std::vector<WorkspaceBlock> free;
};
thread_local Cache cache;

}  // namespace

WorkspaceBlock borrow_workspace(int64_t bytes) {
  std::vector<WorkspaceBlock>& free = cache.free;
  auto best = free.end();
  for (auto i = free.begin(); i != free.end(); ++i) {
    if (i->bytes >= bytes && (best == free.end() || i->bytes < best->bytes)) best = i;
  }
  if (best == free.end()) return allocate(bytes);
  const WorkspaceBlock block = *best;
  free.erase(best);
  return block;
}

void give_back_workspace(WorkspaceBlock block) {
  std::vector<WorkspaceBlock>& free = cache.free;
  free.push_back(block);
  while (static_cast<int64_t>(free.size()) > kKeptWorkspaces ||
         (!free.empty() && cache.bytes() > kKeptWorkspaceBytes)) {
    // The block that came last stays, unless it alone is too large.
    const bool is_last_too_large = free.back().bytes > kKeptWorkspaceBytes;
    const auto leaves = is_last_too_large ? free.end() - 1 : free.begin();
    std::free(leaves->data);
    free.erase(leaves);
  }
}

int64_t kept_workspace_bytes() { return cache.bytes(); }

}  // namespace braze

#endif
