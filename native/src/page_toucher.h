// Has the system supply memory before it is needed.
//
// A page is zeroed on its first use, and on a virtual machine the host may have to find it first:
// milliseconds for a huge page, in the middle of a step. A thread of its own asks for the first part
// of a buffer while the server starts to answer, and ends.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>

#include "huge_buffer.h"

namespace trioengine {

class PageToucher {
 public:
  // Begins with the first `bytes` of the buffer, which must outlive this object. What the buffer
  // holds stays, and may be used meanwhile. Where no thread can be had, nothing happens.
  PageToucher(const HugeBuffer& buffer, std::size_t bytes);
  ~PageToucher();  // waits for at most one huge page
  PageToucher(const PageToucher&) = delete;
  PageToucher& operator=(const PageToucher&) = delete;

 private:
  void touch(char* at, std::size_t bytes) const;

  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace trioengine
