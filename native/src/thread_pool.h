// Threads that run one job together, phase by phase, and cost nothing while there is none.
//
// Theory of operation
// -------------------
// run() publishes a job and works on it itself; workers that are awake in time join. Within a job,
// each phase is a number of units that threads claim; a phase is over when all its units are done,
// not when all threads have passed: a worker that the system has not scheduled holds up nobody as
// long as it has claimed nothing. When run() has finished its own part it closes the job, so that
// no late worker enters, and waits only for those inside.
// The units of a phase may be cut into one range per thread (of the first few): a thread takes its
// own range from the front, then helps with the others. It thus meets the same rows in one phase
// after the other, which its own cache still holds, and knows what it will most probably do next.
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
  static constexpr int kMostRanges = 4;  // more threads share them

  void reset() {
    for (Counter& counter : next_) counter.value.store(0, std::memory_order_relaxed);
    done_.value.store(0, std::memory_order_relaxed);
  }

  // Claims and runs units [0, total) in chunks of `grain` until none is left, then waits until
  // those of other threads are done. What any unit wrote is visible to every thread after it.
  template <class Unit>
  void run(int total, int grain, const Unit& unit) {
    const int mine = claim(0, 0, total, grain, unit);
    finish(mine, total);
  }

  // As above, one by one, thread `thread` of `threads` its own range first.
  template <class Unit>
  void run_ranges(int thread, int threads, int total, const Unit& unit) {
    const int ranges = threads < kMostRanges ? threads : kMostRanges;
    const int share = (total + ranges - 1) / ranges;
    int mine = 0;
    for (int i = 0; i < ranges; ++i) {
      const int range = (thread + i) % ranges, begin = range * share;
      mine += claim(range, begin, begin + share < total ? begin + share : total, 1, unit);
    }
    finish(mine, total);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };

  template <class Unit>
  int claim(int range, int begin, int end, int grain, const Unit& unit) {
    std::atomic<int>& next = next_[range].value;
    int mine = 0;
    for (;;) {
      const int first = begin + next.fetch_add(grain, std::memory_order_relaxed);
      if (first >= end) return mine;
      const int last = first + grain < end ? first + grain : end;
      for (int i = first; i < last; ++i) unit(i);
      mine += last - first;
    }
  }

  void finish(int mine, int total) {
    if (mine > 0) done_.value.fetch_add(mine, std::memory_order_acq_rel);
    wait(total);
  }

  void wait(int total) const;

  Counter next_[kMostRanges];
  Counter done_;
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
