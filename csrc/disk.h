// Pieces of files that are not in memory: read without the page cache, sorted, and each block once.
//
// A read of a mapped file stops its thread for one round trip to the disk, and the kernel reads ahead around it. Here
// all pieces of a request are known at once, so many reads are under way together, and two pieces are read as one where
// the gap between them costs less than another read. Trades a sort and a copy for that.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hoploom {

// A file that is read past the page cache where its file system allows that, and buffered where not.
class DiskFile {
 public:
  explicit DiskFile(std::string path);  // throws std::system_error
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;
  ~DiskFile();

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  int64_t size() const { return size_; }  // when it was opened
  int64_t block() const { return block_; }
  bool is_direct() const { return is_direct_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
  int64_t block_ = 1;  // reads begin and end at multiples of it
  bool is_direct_ = false;
};

// Bytes of a file, and where they go. Pieces of one file are the same or do not overlap.
struct Piece {
  const DiskFile* file;
  int64_t begin, bytes;
  uint8_t* out;
};

// What decides how pieces are read.
struct ReadPlan {
  int64_t gap = 0;          // bytes between two pieces that are read rather than skipped
  int depth = 128;          // reads under way
  bool by_threads = false;  // even where the kernel has a queue for them
};

struct ReadTally {
  int64_t requests = 0;
  int64_t bytes = 0;
};

class DiskError : public std::runtime_error {
 public:
  DiskError(const DiskFile& file, int64_t at, const std::string& what);
  const std::string path;
  const int64_t at;  // the byte of the file
};

// Whether the kernel and the container allow io_uring; found out once.
bool has_read_queue();

// Reads all pieces, which are sorted on the way. Throws DiskError for what cannot be read, when no read is under way.
ReadTally read_pieces(std::vector<Piece>& pieces, const ReadPlan& plan);

}  // namespace hoploom
