#include "huge_buffer.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <utility>

// AddressSanitizer knows nothing of mapped memory: tell it what around a buffer is not to be
// touched. Both are nothing in an ordinary build.
#if defined(__SANITIZE_ADDRESS__)
#define TRIOENGINE_GUARDS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TRIOENGINE_GUARDS 1
#endif
#endif
#ifdef TRIOENGINE_GUARDS
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, size) static_cast<void>(0)
#endif

namespace trioengine {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kChunk = std::size_t{64} << 20;  // of address space: unused pages cost nothing
constexpr std::size_t kAlignment = 4096;
#ifdef TRIOENGINE_GUARDS
constexpr std::size_t kGuard = kAlignment;  // that nobody may touch, after a buffer or a part
#else
constexpr std::size_t kGuard = 0;
#endif

}  // namespace

HugeBuffer::HugeBuffer(std::size_t bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment + kGuard;
  // Small buffers are not worth a huge page each; page alignment serves every kernel.
  const bool huge = bytes >= kHugePage;
  mapped_ = huge ? (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage : rounded;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  std::uintptr_t at = reinterpret_cast<std::uintptr_t>(mapping_);
  if (huge) at = (at + kHugePage - 1) / kHugePage * kHugePage;
  data_ = reinterpret_cast<void*>(at);
  bytes_ = bytes;
  ASAN_POISON_MEMORY_REGION(mapping_, at - reinterpret_cast<std::uintptr_t>(mapping_));
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(data_) + bytes_,
                            reinterpret_cast<std::uintptr_t>(mapping_) + mapped_ - at - bytes_);
#ifdef MADV_HUGEPAGE
  if (huge) madvise(data_, mapped_ - kHugePage, MADV_HUGEPAGE);  // a hint: failing is no error
#endif
}

HugeBuffer::~HugeBuffer() {
  if (mapping_ == nullptr) return;
  ASAN_UNPOISON_MEMORY_REGION(mapping_, mapped_);  // others will be mapped there
  munmap(mapping_, mapped_);
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept { *this = std::move(other); }

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Arena::Part Arena::allocate(std::size_t bytes) {
  if (bytes > kChunk / 2) {
    auto own = std::make_shared<HugeBuffer>(bytes);
    return {own, own->as<void>()};
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (chunk_ == nullptr || used_ + bytes > kChunk) {
    chunk_ = std::make_shared<HugeBuffer>(kChunk);
    used_ = 0;
    ASAN_POISON_MEMORY_REGION(chunk_->as<char>(), kChunk);
  }
  char* data = chunk_->as<char>() + used_;
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment + kGuard;
  return {chunk_, data};
}

}  // namespace trioengine
