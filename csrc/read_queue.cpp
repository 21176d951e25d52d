#include "read_queue.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <system_error>
#include <vector>

#include "disk.h"

namespace hoploom {
namespace {

[[maybe_unused]] constexpr long long kPatience = 300;  // seconds in which one of the reads in flight must end

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

[[maybe_unused]] std::atomic_ref<unsigned> shared(unsigned* word) { return std::atomic_ref<unsigned>(*word); }

struct IdleQueues {
  std::mutex guard;
  std::vector<std::unique_ptr<ReadQueue>> queues;
};

// Never destroyed: threads may outlive static objects. A child process makes its own pool, because it must not receive
// completions of its parent.
std::atomic<IdleQueues*> all_idle{nullptr};

IdleQueues& idle() {
  static const bool is_made = [] {
    all_idle = new IdleQueues;
    pthread_atfork(nullptr, nullptr, [] { all_idle = new IdleQueues; });
    return true;
  }();
  (void)is_made;
  return *all_idle;
}

}  // namespace

#ifdef IORING_FEAT_EXT_ARG

ReadQueue::ReadQueue() {
  io_uring_params params = {};
  descriptor_ = int(syscall(__NR_io_uring_setup, kEntries, &params));
  if (descriptor_ < 0) fail(errno, "io_uring_setup");
  constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_EXT_ARG;
  ring_bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                 params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  const auto map = [&](size_t bytes, off_t at) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_, at);
    return memory == MAP_FAILED ? nullptr : memory;
  };
  errno = ENOSYS;
  if ((params.features & kNeeded) == kNeeded) {
    ring_ = map(ring_bytes_, IORING_OFF_SQ_RING);
    if (ring_) entries_ = map(entries_bytes_, IORING_OFF_SQES);
  }
  if (!entries_) {
    const int error = errno;
    unmap();
    fail(error, "io_uring");
  }
  const auto at = [&](unsigned offset) { return reinterpret_cast<unsigned*>(static_cast<char*>(ring_) + offset); };
  tail_ = at(params.sq_off.tail), mask_ = at(params.sq_off.ring_mask), array_ = at(params.sq_off.array);
  done_head_ = at(params.cq_off.head), done_tail_ = at(params.cq_off.tail), done_mask_ = at(params.cq_off.ring_mask);
  done_ = at(params.cq_off.cqes);
}

ReadQueue::~ReadQueue() { unmap(); }

void ReadQueue::unmap() {
  if (entries_) munmap(entries_, entries_bytes_);
  if (ring_) munmap(ring_, ring_bytes_);
  close(descriptor_);
}

void ReadQueue::push(int descriptor, void* out, uint32_t bytes, int64_t at, uint64_t tag) {
  const unsigned tail = *tail_, index = tail & *mask_;
  io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[index];
  std::memset(&entry, 0, sizeof entry);
  entry.opcode = IORING_OP_READ;
  entry.fd = descriptor;
  entry.addr = reinterpret_cast<uint64_t>(out);
  entry.len = bytes;
  entry.off = uint64_t(at);
  entry.user_data = tag;
  array_[index] = index;
  shared(tail_).store(tail + 1, std::memory_order_release);
  ++pushed_;
}

void ReadQueue::submit_and_wait() {
  __kernel_timespec patience = {kPatience, 0};
  io_uring_getevents_arg how = {};
  how.ts = reinterpret_cast<uint64_t>(&patience);
  while (true) {
    const long submitted = syscall(__NR_io_uring_enter, descriptor_, pushed_, 1u,
                                   IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &how, sizeof how);
    if (submitted >= 0) {
      pushed_ -= unsigned(submitted);
      num_refused_ = 0;
      return;
    }
    if (errno == EAGAIN || errno == EBUSY) {  // the kernel has no room until entries are popped or freed
      if (++num_refused_ > kPatience * 1000) fail(errno, "io_uring_enter");
      usleep(1000);
      return;
    }
    if (errno != EINTR) fail(errno == ETIME ? ETIMEDOUT : errno, "io_uring_enter");
  }
}

bool ReadQueue::pop(Done& done) {
  const unsigned head = *done_head_;
  if (head == shared(done_tail_).load(std::memory_order_acquire)) return false;
  const io_uring_cqe& entry = static_cast<const io_uring_cqe*>(done_)[head & *done_mask_];
  done = {entry.user_data, entry.res};
  shared(done_head_).store(head + 1, std::memory_order_release);
  return true;
}

#else  // headers older than Linux 5.11: read with threads

ReadQueue::ReadQueue() { fail(ENOSYS, "io_uring"); }
ReadQueue::~ReadQueue() = default;
void ReadQueue::push(int, void*, uint32_t, int64_t, uint64_t) {}
void ReadQueue::submit_and_wait() {}
bool ReadQueue::pop(Done&) { return false; }

#endif

std::unique_ptr<ReadQueue> borrow_queue() {
  {
    auto& [guard, queues] = idle();
    const std::lock_guard lock(guard);
    if (!queues.empty()) {
      auto queue = std::move(queues.back());
      queues.pop_back();
      return queue;
    }
  }
  try {
    return std::make_unique<ReadQueue>();
  } catch (const std::system_error&) {  // too little memory that may be locked, too many open files
    return nullptr;
  }
}

void return_queue(std::unique_ptr<ReadQueue> queue) {
  auto& [guard, queues] = idle();
  const std::lock_guard lock(guard);
  queues.push_back(std::move(queue));
}

bool has_read_queue() {
  static const bool has = [] {
    try {
      return_queue(std::make_unique<ReadQueue>());
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }();
  return has;
}

}  // namespace hoploom
