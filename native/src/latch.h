// What a step waits for while somebody else still writes it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace trioengine {

// Opens once it has been counted down to nothing. What was written before that is visible behind
// `wait`.
class Latch {
 public:
  explicit Latch(int count) : left_(count) {}

  void count_down() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (left_.fetch_sub(1, std::memory_order_release) == 1) opened_.notify_all();
  }

  // Sleeps: the core may be needed by whom it waits for.
  void wait() {
    if (open()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    opened_.wait(lock, [this] { return open(); });
  }

 private:
  bool open() const { return left_.load(std::memory_order_acquire) <= 0; }

  std::atomic<int> left_;
  std::mutex mutex_;
  std::condition_variable opened_;
};

}  // namespace trioengine
