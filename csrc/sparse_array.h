// An array that takes memory only for the pages written since they were last dropped.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace hoploom {

class SparseArray {
 public:
  explicit SparseArray(size_t size) : size_(size) {
    if (!size) return;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    bytes_ = static_cast<uint8_t*>(memory);
    madvise(bytes_, size, MADV_NOHUGEPAGE);  // a huge page would take 2 MB for one list
  }
  SparseArray(const SparseArray&) = delete;
  SparseArray& operator=(const SparseArray&) = delete;
  ~SparseArray() {
    if (bytes_) munmap(bytes_, size_);
  }
  uint8_t* bytes() const { return bytes_; }
  size_t size() const { return size_; }
  void forget() {
    if (bytes_) madvise(bytes_, size_, MADV_DONTNEED);
  }

 private:
  size_t size_;
  uint8_t* bytes_ = nullptr;
};

}  // namespace hoploom
