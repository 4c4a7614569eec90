// Threads that run one job together, phase by phase, and cost nothing while there is none.
//
// Theory of operation
// -------------------
// run() publishes a job and works on it itself; workers that are awake in time join. Within a job,
// each phase is a number of units that threads claim in chunks; a phase is over when all its units
// are done, not when all threads have passed: a worker that the system has not scheduled holds up
// nobody as long as it has claimed nothing. When run() has finished its own part it closes the
// job, so that no late worker enters, and waits only for those inside.
// An idle worker spins for some microseconds, because the next step is usually near, then sleeps
// on a futex.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace trioengine {

class Phase {
 public:
  void reset() {
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
  }

  // Claims and runs units [0, total) in chunks of `grain` until none is left, then waits until
  // those of other threads are done. What any unit wrote is visible to every thread after it.
  template <class Unit>
  void run(int total, int grain, const Unit& unit) {
    int mine = 0;
    for (;;) {
      const int first = next_.fetch_add(grain, std::memory_order_relaxed);
      if (first >= total) break;
      const int last = first + grain < total ? first + grain : total;
      for (int i = first; i < last; ++i) unit(i);
      mine += last - first;
    }
    if (mine > 0) done_.fetch_add(mine, std::memory_order_acq_rel);
    wait(total);
  }

 private:
  void wait(int total) const;

  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> done_{0};
};

class ThreadPool {
 public:
  // Throws std::system_error where a thread cannot be started.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls job(thread index) here (index 0) and on the workers that come in time; returns when all
  // have left it. The job must not throw, and must bear being entered again by a thread.
  template <class Job>
  void run(const Job& job) {
    run_erased([](const void* self, int index) { (*static_cast<const Job*>(self))(index); }, &job);
  }

 private:
  using Entry = void (*)(const void*, int);

  void run_erased(Entry entry, const void* job);
  void work(int index);
  bool enter();

  std::vector<std::thread> workers_;
  alignas(64) std::atomic<std::uint32_t> generation_{0};  // the futex
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<std::uint32_t> inside_;  // workers in the job, and the closed bit
  std::atomic<bool> stop_{false};
  Entry entry_ = nullptr;
  const void* job_ = nullptr;
};

}  // namespace trioengine
