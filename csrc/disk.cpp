#include "disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "buffers.h"
#include "read_queue.h"

namespace hoploom {
namespace {

constexpr int64_t kBlock = 4096;
constexpr int64_t kLongest = 256 << 10;  // bytes of one read: longer reads are no faster
constexpr int64_t kBuffers = 16 << 20;   // bytes of all reads in flight

int64_t down(int64_t at, int64_t block) { return at / block * block; }
int64_t up(int64_t at, int64_t block) { return down(at + block - 1, block); }

// One read, and the ranges that it covers, at least in part.
struct Run {
  const DiskFile* file;
  int64_t begin, bytes;
  size_t first, end;
  int64_t end_byte() const { return begin + bytes; }
  int64_t needed() const { return std::min(bytes, file->size() - begin); }  // a file's last block may be shorter
};

bool is_before(const Piece& a, const Piece& b) {
  return a.file != b.file ? std::less<>()(a.file, b.file) : a.begin < b.begin;
}

// Merges sorted ranges into reads.
std::vector<Run> runs_of(const std::vector<Piece>& pieces, int64_t gap) {
  std::vector<Run> runs;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.bytes == 0) continue;
    if (piece.begin + piece.bytes > piece.file->size())
      throw DiskError(*piece.file, piece.begin, "the file ends before it");
    int64_t begin = down(piece.begin, piece.file->block());
    const int64_t end = up(piece.begin + piece.bytes, piece.file->block());
    const bool follows = !runs.empty() && runs.back().file == piece.file;
    if (follows) {
      for (auto run = runs.rbegin(); run != runs.rend() && run->file == piece.file && run->end_byte() > begin; ++run)
        run->end = i + 1;
      begin = std::max(begin, runs.back().end_byte());  // bytes before it are already read
    }
    if (begin >= end) continue;
    if (follows && begin - runs.back().end_byte() <= gap && end - runs.back().begin <= kLongest) {
      runs.back().bytes = end - runs.back().begin;
      runs.back().end = i + 1;
      continue;
    }
    for (; begin < end; begin += kLongest)
      runs.push_back({piece.file, begin, std::min(kLongest, end - begin), i, i + 1});
  }
  return runs;
}

// Copies the bytes of a read to their destinations.
void deliver(const Run& run, const std::vector<Piece>& pieces, const uint8_t* bytes) {
  for (size_t i = run.first; i < run.end; ++i) {
    const Piece& piece = pieces[i];
    const int64_t begin = std::max(piece.begin, run.begin);
    const int64_t end = std::min(piece.begin + piece.bytes, run.begin + run.bytes);
    if (begin < end) std::memcpy(piece.out + (begin - piece.begin), bytes + (begin - run.begin), size_t(end - begin));
  }
}

// Memory for reads, each aligned to a block.
class Slots {
 public:
  Slots(int count, int64_t bytes) : stride_(up(bytes, kBlock)), buffer_(size_t(count * stride_ + kBlock)) {
    first_ = buffer_.as<uint8_t>() + (kBlock - int64_t(reinterpret_cast<uintptr_t>(buffer_.as<uint8_t>()) % kBlock));
  }
  uint8_t* operator[](int slot) const { return first_ + slot * stride_; }
  void keep() { new Buffer(std::move(buffer_)); }  // leaked: the kernel may still write to it

 private:
  int64_t stride_;
  Buffer buffer_;
  uint8_t* first_;
};

// Some file systems open a file for direct reads, and then refuse them or need larger blocks.
bool takes_direct_reads(int descriptor) {
  const Slots block(1, kBlock);
  return pread(descriptor, block[0], size_t(kBlock), 0) >= 0;
}

[[noreturn]] void refuse_short(const Run& run, int64_t got) {
  throw DiskError(*run.file, run.begin + got, "the file ends there, and it was longer when it was opened");
}

[[noreturn]] void refuse_error(const Run& run, int64_t got, int error) {
  throw DiskError(*run.file, run.begin + got, std::generic_category().message(error));
}

// Reads with io_uring: the calling thread keeps the queue full and copies finished reads.
class Queued {
 public:
  Queued(std::unique_ptr<ReadQueue> queue, const std::vector<Run>& runs, const std::vector<Piece>& pieces, int depth,
         int64_t longest)
      : runs_(runs), pieces_(pieces), slots_(depth, longest), jobs_(size_t(depth)), queue_(std::move(queue)) {
    for (int slot = depth; slot--;) free_.push_back(slot);
  }

  void read() {
    try {
      size_t next = 0;
      while (next < runs_.size() || under_way_) {
        while (next < runs_.size() && !free_.empty()) begin(next++);
        wait();
      }
    } catch (const std::system_error& error) {  // an error of the queue itself
      drain();
      throw DiskError(*runs_.front().file, runs_.front().begin, error.what());
    } catch (...) {
      drain();
      throw;
    }
    return_queue(std::move(queue_));
  }

 private:
  struct Job {
    const Run* run = nullptr;
    int64_t got = 0;
  };

  void begin(size_t run) {
    const int slot = free_.back();
    free_.pop_back();
    jobs_[size_t(slot)] = {&runs_[run], 0};
    push(slot);
  }

  void push(int slot) {
    const Job& job = jobs_[size_t(slot)];
    queue_->push(job.run->file->descriptor(), slots_[slot] + job.got, uint32_t(job.run->bytes - job.got),
                 job.run->begin + job.got, uint64_t(slot));
    ++under_way_;
  }

  void wait() {
    queue_->submit_and_wait();
    ReadQueue::Done done;
    while (queue_->pop(done)) {
      --under_way_;
      finish(int(done.tag), done.result);
    }
  }

  void finish(int slot, int result) {
    Job& job = jobs_[size_t(slot)];
    if (result == -EAGAIN || result == -EINTR) return push(slot);
    if (result < 0) refuse_error(*job.run, job.got, -result);
    job.got += result;
    if (job.got >= job.run->needed()) {
      deliver(*job.run, pieces_, slots_[slot]);
      free_.push_back(slot);
    } else if (result == 0 || job.got % job.run->file->block()) {
      refuse_short(*job.run, job.got);
    } else {
      push(slot);
    }
  }

  // Waits for reads in flight, because the kernel writes to their slots; reads that never end keep theirs.
  void drain() noexcept {
    try {
      ReadQueue::Done done;
      while (under_way_) {
        queue_->submit_and_wait();
        while (queue_->pop(done)) --under_way_;
      }
      return_queue(std::move(queue_));
    } catch (...) {
      slots_.keep();
      (void)queue_.release();
    }
  }

  const std::vector<Run>& runs_;
  const std::vector<Piece>& pieces_;
  Slots slots_;
  std::vector<Job> jobs_;
  std::vector<int> free_;
  std::unique_ptr<ReadQueue> queue_;
  int under_way_ = 0;
};

void read_all(const Run& run, uint8_t* out) {
  int64_t got = 0;
  while (got < run.needed()) {
    const ssize_t result = pread(run.file->descriptor(), out + got, size_t(run.bytes - got), off_t(run.begin + got));
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) refuse_error(run, got, errno);
    got += result;
    if (got < run.needed() && (result == 0 || got % run.file->block())) refuse_short(run, got);
  }
}

// Reads with threads, one read at a time each.
void read_by_threads(const std::vector<Run>& runs, const std::vector<Piece>& pieces, int depth, int64_t longest) {
  const Slots slots(depth, longest);
  std::atomic<size_t> next = 0;
  std::mutex failing;
  std::exception_ptr failure;
  const auto work = [&](int slot) {
    for (size_t i; (i = next++) < runs.size();) try {
        read_all(runs[i], slots[slot]);
        deliver(runs[i], pieces, slots[slot]);
      } catch (...) {
        next = runs.size();
        const std::lock_guard lock(failing);
        if (!failure) failure = std::current_exception();
      }
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (int slot = 1; slot < depth; ++slot) threads.emplace_back(work, slot);
    } catch (const std::exception&) {  // a container allows few threads: the ones started read everything
    }
    work(0);
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

DiskError::DiskError(const DiskFile& file, int64_t at, const std::string& what)
    : std::runtime_error(what), path(file.path()), at(at) {}

DiskFile::DiskFile(std::string path) : path_(std::move(path)) {
  descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  is_direct_ = descriptor_ >= 0 && takes_direct_reads(descriptor_);
  if (descriptor_ >= 0 && !is_direct_) close(descriptor_);
  if (!is_direct_) descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat found;
  if (descriptor_ < 0 || fstat(descriptor_, &found)) {
    const int error = errno;
    if (descriptor_ >= 0) close(descriptor_);
    throw std::system_error(error, std::generic_category(), path_);
  }
  size_ = found.st_size;
  if (is_direct_) block_ = kBlock;
  else posix_fadvise(descriptor_, 0, 0, POSIX_FADV_RANDOM);
}

DiskFile::~DiskFile() { close(descriptor_); }

ReadTally read_pieces(std::vector<Piece>& pieces, const ReadPlan& plan) {
  std::sort(pieces.begin(), pieces.end(), is_before);
  const std::vector<Run> runs = runs_of(pieces, plan.gap);
  ReadTally tally;
  int64_t longest = 0;
  for (const Run& run : runs) {
    tally.bytes += run.needed();
    longest = std::max(longest, run.bytes);
  }
  tally.requests = int64_t(runs.size());
  if (runs.empty()) return tally;
  const int fitting = int(std::clamp<int64_t>(kBuffers / longest, 8, plan.depth));
  const int depth = int(std::min<int64_t>(fitting, tally.requests));
  std::unique_ptr<ReadQueue> queue = plan.by_threads || !has_read_queue() ? nullptr : borrow_queue();
  if (queue) Queued(std::move(queue), runs, pieces, depth, longest).read();
  else read_by_threads(runs, pieces, std::min(depth, 32), longest);
  return tally;
}

}  // namespace hoploom
