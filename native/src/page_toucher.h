// Has the system supply memory before it is needed.
//
// A page is zeroed on its first use, and on a virtual machine the host may have to find it first:
// milliseconds for a huge page, in the middle of a step. A thread of its own asks for the first part
// of a buffer while the server starts to answer, and later stays as far ahead of what is in use as
// has been used already: bursts find their memory ready, and never much more than twice as much is
// taken as is needed. It works while there are no steps: between two of them even a thread of the
// lowest priority makes a core look taken to those who look for one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

#include "huge_buffer.h"

namespace trioengine {

class PageToucher {
 public:
  // Begins with the first `early` bytes of the buffer, which must outlive this object. What the
  // buffer holds stays, and may be used meanwhile. Where no thread can be had, nothing happens.
  PageToucher(const HugeBuffer& buffer, std::size_t early);
  ~PageToucher();  // waits for at most one huge page
  PageToucher(const PageToucher&) = delete;
  PageToucher& operator=(const PageToucher&) = delete;

  // A step begins that uses the first `used` bytes. By one thread, each begin with its end; costs
  // next to nothing where nothing new is used.
  void begin_step(std::size_t used);
  void end_step();

 private:
  void work();
  bool rest(std::unique_lock<std::mutex>* lock);

  char* const at_;
  const std::size_t size_;  // whole huge pages, as is all that is counted here
  std::atomic<std::uint64_t> begins_and_ends_{0};  // odd: within a step
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::size_t wanted_;  // written with the mutex held, by the one thread that has steps
  std::uint64_t seen_ = 0;  // the thread's: at its last look
  std::thread thread_;
};

}  // namespace trioengine
