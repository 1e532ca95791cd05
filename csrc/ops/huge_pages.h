// Large pages for large results on a CPU.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace braze {

// Results from this size on are worth the call.
constexpr int64_t kHugePageBytes = int64_t{4} << 20;

// Asks for pages of 2 MiB in what they cover of [data, data + bytes). The allocator hands memory of
// some ten megabytes back to the system each time it is freed, so a large result is made of fresh
// pages: as ones of 4 KiB they take longer to come by than most ops take to fill them. A wish: the
// system may have switched it off, and says nothing of use if it refuses.
inline void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kPage - 1) & ~(kPage - 1);
  const uintptr_t last = (begin + static_cast<uintptr_t>(bytes)) & ~(kPage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace braze
