// Reads that the kernel makes while this process goes on: io_uring by its system calls, so that no library is needed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace hoploom {

// Up to kEntries reads under way. For one thread at a time.
class ReadQueue {
 public:
  static constexpr unsigned kEntries = 128;

  struct Done {
    uint64_t tag;
    int32_t result;  // bytes, or minus the error's number
  };

  ReadQueue();  // throws std::system_error where io_uring is forbidden or too old
  ReadQueue(const ReadQueue&) = delete;
  ReadQueue& operator=(const ReadQueue&) = delete;
  ~ReadQueue();

  void push(int descriptor, void* out, uint32_t bytes, int64_t at, uint64_t tag);
  void submit_and_wait();  // for one to be done; throws std::system_error after kPatience without one
  bool pop(Done& done);

 private:
  void unmap();

  int descriptor_ = -1;
  unsigned pushed_ = 0;        // and not submitted
  long long num_refused_ = 0;  // submissions in a row
  void* ring_ = nullptr;
  size_t ring_bytes_ = 0;
  void* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  unsigned *tail_ = nullptr, *mask_ = nullptr, *array_ = nullptr;
  unsigned *done_head_ = nullptr, *done_tail_ = nullptr, *done_mask_ = nullptr;
  void* done_ = nullptr;
};

// Queues are kept for the next request: making one costs more than a small read.
std::unique_ptr<ReadQueue> borrow_queue();  // none where the kernel gives none now
void return_queue(std::unique_ptr<ReadQueue> queue);

}  // namespace hoploom
