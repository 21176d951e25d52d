// Pieces of files by io_uring and by threads, against the same bytes in memory.
#include "../disk.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "../read_queue.h"
#include "check.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

std::mt19937_64 draws(1);
int64_t below(int64_t limit) { return int64_t(draws() % uint64_t(limit)); }

// A file of random bytes, and what it holds.
class RandomFile {
 public:
  explicit RandomFile(int64_t size) : bytes(size_t(size)) {
    for (uint8_t& byte : bytes) byte = uint8_t(draws());
    descriptor_ = mkstemp(path);
    CHECK_EQUAL(write(descriptor_, bytes.data(), bytes.size()), ssize_t(size));
  }
  ~RandomFile() {
    unlink(path);
    close(descriptor_);
  }
  void truncate(int64_t size) const { CHECK_EQUAL(ftruncate(descriptor_, size), 0); }
  char path[64] = P_tmpdir "/hoploom-disk-XXXXXX";
  std::vector<uint8_t> bytes;

 private:
  int descriptor_;
};

// Rows of a table that begins at an odd byte; some more than once.
void check_rows(const RandomFile& source, const DiskFile& file, int64_t row_bytes, const ReadPlan& plan) {
  constexpr int64_t kOffset = 131;
  const int64_t num_rows = (int64_t(source.bytes.size()) - kOffset) / row_bytes,
                count = std::min<int64_t>(700, 3 * num_rows);
  std::vector<uint8_t> out(size_t(count * row_bytes));
  std::vector<int64_t> begins;
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; ++i) {
    begins.push_back(kOffset + below(num_rows) * row_bytes);
    pieces.push_back({&file, begins.back(), row_bytes, out.data() + i * row_bytes});
  }
  const ReadTally tally = read_pieces(pieces, plan);
  for (int64_t i = 0; i < count; ++i)
    CHECK(std::memcmp(out.data() + i * row_bytes, source.bytes.data() + begins[size_t(i)], size_t(row_bytes)) == 0);
  CHECK(tally.requests > 0 && tally.requests <= count * (1 + row_bytes / (256 << 10)) + 1);
  CHECK(tally.bytes <= int64_t(source.bytes.size()));  // no block is read twice
}

TEST(rows_are_those_of_the_file) {
  const RandomFile source((3 << 20) + 77);
  const DiskFile file(source.path);
  for (const int64_t row_bytes : {1, 4, 100, 512, 4096, 5000, 300000, 700001})
    for (const int64_t gap : {0, 4096, 30000, 1 << 30})
      for (const bool by_threads : {false, true}) check_rows(source, file, row_bytes, {gap, 128, by_threads});
}

TEST(two_files_are_read_together) {
  const RandomFile one(50000), two(90000);
  const DiskFile first(one.path), second(two.path);
  std::vector<uint8_t> out(4 * 100);
  std::vector<Piece> pieces = {{&second, 80000, 100, out.data()},
                               {&first, 40000, 100, out.data() + 100},
                               {&second, 7, 100, out.data() + 200},
                               {&first, 49900, 100, out.data() + 300}};
  CHECK_EQUAL(read_pieces(pieces, {}).requests, 4);
  CHECK(std::memcmp(out.data(), two.bytes.data() + 80000, 100) == 0);
  CHECK(std::memcmp(out.data() + 100, one.bytes.data() + 40000, 100) == 0);
  CHECK(std::memcmp(out.data() + 200, two.bytes.data() + 7, 100) == 0);
  CHECK(std::memcmp(out.data() + 300, one.bytes.data() + 49900, 100) == 0);
}

TEST(nothing_is_read_for_no_pieces) {
  std::vector<Piece> pieces;
  CHECK_EQUAL(read_pieces(pieces, {}).requests, 0);
}

TEST(a_file_that_shrinks_is_an_error_at_its_byte) {
  for (const bool by_threads : {false, true}) {
    const RandomFile source(1 << 20);
    const DiskFile file(source.path);
    source.truncate(500000);
    std::vector<uint8_t> out(64 * 200);
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < 64; ++i) pieces.push_back({&file, i * 16000, 200, out.data() + i * 200});
    bool is_refused = false;
    try {
      read_pieces(pieces, {0, 128, by_threads});
    } catch (const DiskError& error) {
      is_refused = true;
      CHECK_EQUAL(error.path, std::string(source.path));
      CHECK(error.at >= 499712 && error.at <= (1 << 20));
    }
    CHECK(is_refused);
  }
}

TEST(pieces_behind_the_end_of_a_file_are_an_error) {
  const RandomFile source(10000);
  const DiskFile file(source.path);
  uint8_t out[200];
  for (const bool by_threads : {false, true})
    for (const int64_t begin : {9900, 10000, 50000}) {
      std::vector<Piece> pieces = {{&file, 0, 100, out}, {&file, begin, 101, out + 99}};
      int64_t at = -1;
      try {
        read_pieces(pieces, {0, 128, by_threads});
      } catch (const DiskError& error) {
        at = error.at;
      }
      CHECK_EQUAL(at, begin);
    }
}

TEST(a_child_process_has_queues_of_its_own) {
  if (!has_read_queue()) return;
  std::unique_ptr<ReadQueue> queue = borrow_queue();
  const ReadQueue* own = queue.get();
  return_queue(std::move(queue));
  const pid_t child = fork();
  if (child == 0) _exit(borrow_queue().get() == own);
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(borrow_queue().get() == own);
}

TEST(what_is_no_file_is_an_error) {
  bool is_refused = false;
  try {
    const DiskFile file("/nowhere/rows.npy");
  } catch (const std::system_error&) {
    is_refused = true;
  }
  CHECK(is_refused);
}

}  // namespace
