#include "page_toucher.h"

#include <sys/mman.h>

#include <algorithm>
#include <system_error>

#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers do not name it
#endif

namespace trioengine {
namespace {

constexpr std::size_t kStretch = std::size_t{2} << 20;  // a huge page
constexpr std::size_t kPage = 4096;

}  // namespace

PageToucher::PageToucher(const HugeBuffer& buffer, std::size_t bytes) {
  bytes = std::min(bytes, buffer.size()) / kPage * kPage;  // whole pages of the buffer alone
  if (bytes < kStretch) return;                            // not worth a thread
  try {
    thread_ = std::thread([this, at = buffer.as<char>(), bytes] { touch(at, bytes); });
  } catch (const std::system_error&) {
    // The pages then come on their first use.
  }
}

PageToucher::~PageToucher() {
  stop_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
}

void PageToucher::touch(char* at, std::size_t bytes) const {
#ifdef MADV_POPULATE_WRITE
  for (std::size_t done = 0; done < bytes; done += kStretch) {
    if (stop_.load(std::memory_order_relaxed)) return;
    // A hint: a system that does not know it, or has no memory left, ends this.
    if (madvise(at + done, std::min(kStretch, bytes - done), MADV_POPULATE_WRITE) != 0) return;
  }
#else
  static_cast<void>(at);
  static_cast<void>(bytes);
#endif
}

}  // namespace trioengine
