// Output buffers that return to a process-wide pool when their last reader drops them.
// Gives up some idle memory (bounded) for never paying page faults twice.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace hoploom {

// Owns `capacity` bytes; its first `size` bytes are what a reader sees.
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
  // Makes room for `size` bytes, keeping the first `kept`.
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
// From now on so many idle bytes at most: for who has little memory.
void pool_keep_at_most(size_t bytes);

// Has malloc keep what is freed, in this process and from now on, rather than fault the same pages in at every training
// step. False where the C library offers no such setting.
bool keep_freed_memory();

// Returns what malloc keeps of freed memory, after keep_freed_memory() too, and idle buffers to the operating system.
void give_back_freed_memory();

// Zeroed memory straight from the operating system: untouched pages cost nothing.
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
