// Zeroed memory on huge pages where the system gives them.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

namespace trioengine {

class HugeBuffer {
 public:
  HugeBuffer() = default;
  // Throws std::bad_alloc. Pages are touched on first use only.
  explicit HugeBuffer(std::size_t bytes);
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;  // 2 MiB-aligned within the mapping
  void* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  std::size_t bytes_ = 0;
};

// Hands out parts of large buffers, so that matrices smaller than a huge page share some.
class Arena {
 public:
  struct Part {
    std::shared_ptr<HugeBuffer> owner;
    void* data;  // aligned to 4096 bytes, zeroed
  };

  // Throws std::bad_alloc. From any thread.
  Part allocate(std::size_t bytes);

 private:
  std::mutex mutex_;
  std::shared_ptr<HugeBuffer> chunk_;
  std::size_t used_ = 0;
};

}  // namespace trioengine
