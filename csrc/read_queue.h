// Asynchronous reads with io_uring, through its system calls, so that no library is needed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace hoploom {

// A queue of up to kEntries reads in flight. Not thread-safe.
class ReadQueue {
 public:
  static constexpr unsigned kEntries = 128;

  struct Done {
    uint64_t tag;
    int32_t result;  // number of bytes, or a negative error number
  };

  ReadQueue();  // throws std::system_error if io_uring is forbidden or too old
  ReadQueue(const ReadQueue&) = delete;
  ReadQueue& operator=(const ReadQueue&) = delete;
  ~ReadQueue();

  void push(int descriptor, void* out, uint32_t bytes, int64_t at, uint64_t tag);
  void submit_and_wait();  // waits for one read; throws std::system_error if none ends in kPatience seconds
  bool pop(Done& done);

 private:
  void unmap();

  int descriptor_ = -1;
  unsigned pushed_ = 0;        // not yet submitted
  long long num_refused_ = 0;  // failed submissions in a row
  void* ring_ = nullptr;
  size_t ring_bytes_ = 0;
  void* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  unsigned *tail_ = nullptr, *mask_ = nullptr, *array_ = nullptr;
  unsigned *done_head_ = nullptr, *done_tail_ = nullptr, *done_mask_ = nullptr;
  void* done_ = nullptr;
};

// Takes a queue from the pool of the process: making one costs more than a small read.
std::unique_ptr<ReadQueue> borrow_queue();  // null if the kernel gives none now
void return_queue(std::unique_ptr<ReadQueue> queue);

}  // namespace hoploom
