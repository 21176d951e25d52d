#include "buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace hoploom {
namespace {

constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kIdleLeast = size_t(512) << 20;

// Size classes in steps of a quarter of a power of two: at most 25 % is wasted, and batches of
// nearly the same size share a class.
size_t size_class(size_t size) {
  if (size > PTRDIFF_MAX / 2) throw std::bad_alloc();
  size_t power = 256;
  while (power < size) power *= 2;
  const size_t step = power / 8;
  return power == 256 ? power : (size + step - 1) / step * step;
}

void* map_pages(size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  madvise(pages, bytes, MADV_HUGEPAGE);
  return pages;
}

void* allocate(size_t bytes) {
  if (bytes >= kHuge) return map_pages(bytes);
  void* block = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!block) throw std::bad_alloc();
  return block;
}

void release(void* block, size_t bytes) {
  if (bytes >= kHuge) munmap(block, bytes);
  else std::free(block);
}

// Idle blocks form a list through their own memory, so that freeing a block cannot fail for lack of memory.
struct Idle {
  Idle* next;
  size_t bytes;
};

size_t list_of(size_t bytes) {
  const size_t power = std::bit_ceil(bytes);
  return size_t(std::countr_zero(power)) * 4 + bytes / (power / 8) - 5;
}

void release_all(Idle* blocks) {
  while (blocks) {
    Idle* next = blocks->next;
    release(blocks, blocks->bytes);
    blocks = next;
  }
}

class Pool {
 public:
  void* take(size_t bytes) {
    {
      std::lock_guard lock(mutex_);
      live_ += bytes;
      peak_ = std::max(peak_, live_);
      if (Idle* block = pop(idle_[list_of(bytes)])) return block;
    }
    try {
      return allocate(bytes);
    } catch (...) {
      std::lock_guard lock(mutex_);
      live_ -= bytes;
      throw;
    }
  }
  // Keeps the block, and frees blocks of other sizes if needed, so that unused sizes disappear.
  void give(void* block, size_t bytes) noexcept {
    Idle* evicted = nullptr;
    {
      std::lock_guard lock(mutex_);
      live_ -= bytes;
      Idle*& own = idle_[list_of(bytes)];
      if (bytes <= limit())  // nothing is freed for a block that cannot fit
        for (Idle*& list : idle_)
          while (&list != &own && list && idle_bytes_ + bytes > limit()) push(evicted, pop(list));
      const bool fits = idle_bytes_ + bytes <= limit();
      push(fits ? own : evicted, new (block) Idle{nullptr, bytes});
      if (fits) idle_bytes_ += bytes;
    }
    release_all(evicted);
  }
  PoolUse use() {
    std::lock_guard lock(mutex_);
    return {idle_bytes_, live_};
  }
  void keep_at_most(size_t bytes) {
    std::lock_guard lock(mutex_);
    most_ = bytes;
  }
  void trim() {
    Idle* evicted = nullptr;
    {
      std::lock_guard lock(mutex_);
      for (Idle*& list : idle_)
        while (list) push(evicted, pop(list));
      peak_ = live_;
    }
    release_all(evicted);
  }

 private:
  // All blocks in use may become idle together, because batches come and go together.
  size_t limit() const { return std::min(most_, std::max(kIdleLeast, peak_)); }
  Idle* pop(Idle*& list) {
    Idle* block = list;
    if (!block) return nullptr;
    list = block->next;
    idle_bytes_ -= block->bytes;
    return block;
  }
  static void push(Idle*& list, Idle* block) {
    block->next = list;
    list = block;
  }

  std::mutex mutex_;
  Idle* idle_[64 * 4] = {};  // by size, ascending
  size_t idle_bytes_ = 0, live_ = 0, peak_ = 0, most_ = SIZE_MAX;
};

// Never destroyed: buffers may outlive every other static at interpreter exit.
Pool& pool() {
  static Pool* instance = new Pool;
  return *instance;
}

}  // namespace

Buffer::Buffer(size_t size) : size_(size), capacity_(size_class(size)) { bytes_ = pool().take(capacity_); }

Buffer::~Buffer() {
  if (bytes_) pool().give(bytes_, capacity_);
}

void Buffer::grow(size_t size, size_t kept) {
  if (size > capacity_) {
    Buffer larger(size + size / 2);
    if (kept) std::memcpy(larger.bytes_, bytes_, kept);
    swap(larger);
  }
  size_ = size;
}

PoolUse pool_use() { return pool().use(); }
void pool_trim() { pool().trim(); }
void pool_keep_at_most(size_t bytes) { pool().keep_at_most(bytes); }

bool keep_freed_memory() {
#ifdef __GLIBC__
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, -1) == 1;
#else
  return false;
#endif
}

void give_back_freed_memory() {
  pool_trim();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

ZeroedPages::ZeroedPages(size_t bytes) : size_(bytes ? bytes : 1) { bytes_ = map_pages(size_); }
ZeroedPages::~ZeroedPages() {
  if (bytes_) munmap(bytes_, size_);
}

}  // namespace hoploom
