#include "page_toucher.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers do not name it
#endif

namespace trioengine {
namespace {

constexpr std::size_t kStretch = std::size_t{2} << 20;  // a huge page
constexpr std::size_t kLeastGrowth = 8 * kStretch;  // worth waking a thread for
constexpr std::chrono::milliseconds kQuiet{50};     // without a step, before more is asked for

// False where the system does not know this hint, or has no memory left.
bool populate(char* at, std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  return madvise(at, bytes, MADV_POPULATE_WRITE) == 0;
#else
  static_cast<void>(at);
  static_cast<void>(bytes);
  return false;
#endif
}

}  // namespace

PageToucher::PageToucher(const HugeBuffer& buffer, std::size_t early)
    : at_(buffer.as<char>()),
      size_(buffer.size() / kStretch * kStretch),
      wanted_(std::min(early / kStretch * kStretch, size_)) {
  if (size_ == 0) return;  // not worth a thread
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error&) {
    // The pages then come on their first use.
  }
}

PageToucher::~PageToucher() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void PageToucher::begin_step(std::size_t used) {
  begins_and_ends_.fetch_add(1, std::memory_order_relaxed);
  if (2 * used <= wanted_ || wanted_ == size_) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    wanted_ = std::min((2 * used + kLeastGrowth) / kStretch * kStretch, size_);
  }
  changed_.notify_all();
}

void PageToucher::end_step() { begins_and_ends_.fetch_add(1, std::memory_order_relaxed); }

void PageToucher::work() {
  std::size_t supplied = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    if (supplied >= wanted_) {
      changed_.wait(lock);
    } else if (rest(&lock)) {
      lock.unlock();
      if (!populate(at_ + supplied, kStretch)) return;
      supplied += kStretch;
      lock.lock();
    }
  }
}

// True where there has been no step for a while; else waits, with the lock given up.
bool PageToucher::rest(std::unique_lock<std::mutex>* lock) {
  const std::uint64_t now = begins_and_ends_.load(std::memory_order_relaxed);
  if (now % 2 == 0 && now == seen_) return true;
  seen_ = now;
  changed_.wait_for(*lock, kQuiet);
  return false;
}

}  // namespace trioengine
