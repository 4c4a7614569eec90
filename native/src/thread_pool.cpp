#include "thread_pool.h"

#include <sched.h>

#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace trioengine {
namespace {

constexpr std::uint32_t kClosed = 1u << 31;
constexpr int kPhaseSpins = 4096;  // a waiting thread then yields: its core may be needed
constexpr int kIdleSpins = 2048;   // about 100 us on x86: the gap between two busy steps

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#endif
}

#if defined(__linux__)
void sleep_on(std::atomic<std::uint32_t>* word, std::uint32_t seen) {
  static_assert(sizeof *word == 4, "a futex is 32 bits");
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void wake_all(std::atomic<std::uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
void sleep_on(std::atomic<std::uint32_t>*, std::uint32_t) { std::this_thread::yield(); }
void wake_all(std::atomic<std::uint32_t>*) {}
#endif

template <class Done>
void spin_until(const Done& done) {
  for (int spins = 0; !done(); ++spins) {
    if (spins < kPhaseSpins) {
      pause();
    } else {
      sched_yield();
    }
  }
}

}  // namespace

void Phase::wait(int total) const {
  spin_until([&] { return done_.value.load(std::memory_order_acquire) >= total; });
}

ThreadPool::ThreadPool(int threads) : inside_(kClosed) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    stop_.store(true);
    generation_.fetch_add(1);
    wake_all(&generation_);
    for (std::thread& worker : workers_) worker.join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  generation_.fetch_add(1);
  wake_all(&generation_);
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_erased(Entry entry, const void* job) {
  if (workers_.empty()) return entry(job, 0);
  entry_ = entry;
  job_ = job;
  inside_.store(0, std::memory_order_release);  // open: what was written above is visible inside
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(&generation_);
  entry(job, 0);
  inside_.fetch_or(kClosed, std::memory_order_acq_rel);
  spin_until([&] { return inside_.load(std::memory_order_acquire) == kClosed; });
}

bool ThreadPool::enter() {
  std::uint32_t seen = inside_.load(std::memory_order_acquire);
  while ((seen & kClosed) == 0) {
    if (inside_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void ThreadPool::work(int index) {
  std::uint32_t seen = 0;
  for (;;) {
    for (int spins = 0; generation_.load(std::memory_order_seq_cst) == seen; ++spins) {
      if (spins < kIdleSpins) {
        pause();
        continue;
      }
      // Announced before the kernel compares the word again: run() either sees the sleeper or has
      // changed the word, and then the wait returns at once.
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      sleep_on(&generation_, seen);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    seen = generation_.load(std::memory_order_seq_cst);
    if (stop_.load()) return;
    if (!enter()) continue;
    entry_(job_, index);
    inside_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace trioengine
