// Output buffers that return to a process-wide pool when their last reader frees them.
// Costs some idle memory (bounded), and saves page faults in fresh memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace hoploom {

// A block of `capacity` bytes, of which the first `size` are in use.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer();

  template <typename T>
  T* as() const {
    return static_cast<T*>(bytes_);
  }
  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }
  void trim(size_t size) { size_ = size; }
  // Grows to `size` bytes and keeps the first `kept`.
  void grow(size_t size, size_t kept);

 private:
  void swap(Buffer& other) {
    std::swap(bytes_, other.bytes_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }
  void* bytes_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

struct PoolUse {
  size_t idle_bytes, live_bytes;
};
PoolUse pool_use();
// Returns idle buffers to the operating system.
void pool_trim();
// Limits the idle bytes that the pool keeps.
void pool_keep_at_most(size_t bytes);

// Configures malloc to keep freed memory in this process, so that training steps do not fault the same pages in again.
// Returns false if the C library has no such setting.
bool keep_freed_memory();

// Returns idle buffers and freed memory of malloc to the operating system, also after keep_freed_memory().
void give_back_freed_memory();

// Zeroed memory from the operating system; a page takes memory once it is written.
class ZeroedPages {
 public:
  ZeroedPages() = default;
  explicit ZeroedPages(size_t bytes);
  ZeroedPages(ZeroedPages&& other) noexcept { std::swap(bytes_, other.bytes_), std::swap(size_, other.size_); }
  ZeroedPages& operator=(ZeroedPages&& other) noexcept {
    std::swap(bytes_, other.bytes_), std::swap(size_, other.size_);
    return *this;
  }
  ~ZeroedPages();
  template <typename T>
  T* as() const {
    return static_cast<T*>(bytes_);
  }

 private:
  void* bytes_ = nullptr;
  size_t size_ = 0;
};

}  // namespace hoploom
