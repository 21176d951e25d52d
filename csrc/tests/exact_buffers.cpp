// buffers.cpp for the fuzzer: no pool, not a byte to spare, so that AddressSanitizer sees every
// overrun that rounded and recycled buffers would hide.
#include <cstdlib>
#include <cstring>
#include <new>

#include "../buffers.h"

namespace hoploom {
namespace {
void* checked(void* block) {
  if (!block) throw std::bad_alloc();
  return block;
}
}  // namespace

Buffer::Buffer(size_t size) : size_(size), capacity_(size) { bytes_ = checked(std::malloc(size)); }
Buffer::~Buffer() { std::free(bytes_); }

void Buffer::grow(size_t size, size_t kept) {
  if (size > capacity_) {
    Buffer larger(size);
    if (kept) std::memcpy(larger.bytes_, bytes_, kept);
    swap(larger);
  }
  size_ = size;
}

PoolUse pool_use() { return {0, 0}; }
void pool_trim() {}

ZeroedPages::ZeroedPages(size_t bytes) : size_(bytes) { bytes_ = checked(std::calloc(bytes, 1)); }
ZeroedPages::~ZeroedPages() { std::free(bytes_); }

}  // namespace hoploom
