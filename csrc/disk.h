// Reads of file ranges that are not in memory: without the page cache, sorted, and each block once.
//
// A read of a mapped file stops its thread for one round trip to the disk, and the kernel reads ahead around it. Here
// all ranges of a request are known at once, so many reads are in flight together, and two ranges are read as one if
// the gap between them costs less than another read. Costs a sort and a copy.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hoploom {

// A file opened for direct reads if its file system supports them, else for buffered ones.
class DiskFile {
 public:
  explicit DiskFile(std::string path);  // throws std::system_error
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;
  ~DiskFile();

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  int64_t size() const { return size_; }  // size when the file was opened
  int64_t block() const { return block_; }
  bool is_direct() const { return is_direct_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
  int64_t block_ = 1;  // alignment of reads
  bool is_direct_ = false;
};

// A range of a file, and its destination in memory. Ranges of one file are equal or do not overlap.
struct Piece {
  const DiskFile* file;
  int64_t begin, bytes;
  uint8_t* out;
};

// Settings of a read.
struct ReadPlan {
  int64_t gap = 0;          // largest gap between two ranges that is read instead of skipped
  int depth = 128;          // reads in flight
  bool by_threads = false;  // use threads even if io_uring is available
};

struct ReadTally {
  int64_t requests = 0;
  int64_t bytes = 0;
};

class DiskError : public std::runtime_error {
 public:
  DiskError(const DiskFile& file, int64_t at, const std::string& what);
  const std::string path;
  const int64_t at;  // offset in the file
};

// Returns whether the kernel and the container allow io_uring; cached.
bool has_read_queue();

// Reads all ranges, and sorts them on the way. Throws DiskError for a failed read, once none is in flight.
ReadTally read_pieces(std::vector<Piece>& pieces, const ReadPlan& plan);

}  // namespace hoploom
