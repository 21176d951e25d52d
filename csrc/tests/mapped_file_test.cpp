// Files that get shorter while they are mapped.
#include "../mapped_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <fstream>
#include <new>
#include <thread>

#include "../gather.h"
#include "check.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

constexpr int64_t kRows = 64, kRowBytes = 4096;

// A file without a name: row v is full of bytes v.
class RowsFile {
 public:
  RowsFile() {
    char path[] = P_tmpdir "/hoploom-mapped-XXXXXX";
    descriptor_ = mkstemp(path);
    unlink(path);
    for (int64_t v = 0; v < kRows; ++v) {
      const std::vector<uint8_t> row(kRowBytes, uint8_t(v));
      CHECK_EQUAL(write(descriptor_, row.data(), row.size()), ssize_t(kRowBytes));
    }
  }
  ~RowsFile() { close(descriptor_); }
  MappedFile map(const std::string& name) const { return MappedFile(descriptor_, kRows * kRowBytes, name); }
  void truncate(int64_t rows) const { CHECK_EQUAL(ftruncate(descriptor_, rows * kRowBytes), 0); }

 private:
  int descriptor_;
};

// The message of the error, or the first byte of the row.
std::string row_of(const MappedFile& file, int64_t id) {
  std::vector<uint8_t> out(kRowBytes);
  const std::array<const void*, 1> arrays = {static_cast<const char*>(file.bytes()) + 8};  // anywhere in it
  const std::string error = thrown_by([&] {
    read_maps(arrays,
              [&] { gather(static_cast<const uint8_t*>(file.bytes()), kRows, kRowBytes, &id, 1, 0, out.data()); });
  });
  return error.empty() ? std::to_string(out[0]) : error;
}

bool names(const std::string& error, const char* name) { return error.find(name) == 0; }

}  // namespace

TEST(a_file_that_was_truncated_is_an_error_with_its_name_and_others_go_on) {
  const RowsFile shorter, whole;
  const MappedFile damaged = shorter.map("shorter.npy"), other = whole.map("whole.npy");
  CHECK_EQUAL(row_of(damaged, 40), std::string("40"));
  shorter.truncate(20);
  CHECK(names(row_of(damaged, 41), "shorter.npy cannot be read any more"));
  CHECK(names(row_of(damaged, 41), "shorter.npy"));  // its zeros are there now: still an error
  CHECK(names(row_of(damaged, 3), "shorter.npy"));
  CHECK_EQUAL(row_of(other, 41), std::string("41"));
  const MappedFile again = shorter.map("again.npy");  // a map of its own is not damaged before it is read
  CHECK_EQUAL(row_of(again, 3), std::string("3"));
}

TEST(a_map_that_takes_the_place_of_a_damaged_one_is_whole) {
  for (int round = 0; round < 5; ++round) {
    const RowsFile file, next;
    {
      const MappedFile damaged = file.map("first.npy");
      file.truncate(0);
      CHECK(names(row_of(damaged, 1), "first.npy"));
    }
    const MappedFile whole = next.map("second.npy");
    CHECK_EQUAL(row_of(whole, 63), std::string("63"));
  }
}

TEST(what_zeros_led_to_gives_way_to_the_damage) {
  const RowsFile file;
  const MappedFile damaged = file.map("list.npy");
  file.truncate(0);
  const std::array<const void*, 2> arrays = {nullptr, damaged.bytes()};
  const std::string error = thrown_by([&] {
    read_maps(arrays, [&] { throw std::out_of_range(std::to_string(*static_cast<volatile char*>(damaged.bytes()))); });
  });
  CHECK(names(error, "list.npy"));
  CHECK_EQUAL(thrown_by([&] { read_maps({}, [] { throw std::out_of_range("of another reason"); }); }),
              std::string("of another reason"));
}

TEST(threads_that_read_a_file_while_it_gets_shorter_all_see_the_error) {
  const RowsFile file;
  const MappedFile damaged = file.map("shared.npy");
  std::vector<std::string> errors(4);
  std::atomic<int> started = 0;
  std::vector<std::thread> threads;
  for (std::string& error : errors)
    threads.emplace_back([&] {
      ++started;
      for (int64_t id = 1; error.empty(); id = id % (kRows - 1) + 1)
        if (const std::string seen = row_of(damaged, id); seen != std::to_string(id)) error = seen;
    });
  while (started < 4) std::this_thread::yield();
  file.truncate(1);
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) CHECK(names(error, "shared.npy"));
}

TEST(without_memory_a_map_is_refused_and_others_are_given_back) {
  const auto num_mapped = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("/hoploom-mapped-") != std::string::npos;
    return count;
  };
  const RowsFile file;
  {
    std::vector<MappedFile> maps;  // more than there were ever at once: the next one needs an entry of its own
    for (int i = 0; i < 100; ++i) maps.push_back(file.map(""));
    const int before = num_mapped();
    has_no_memory = true;
    bool is_refused = false;
    try {
      file.map("");
    } catch (const std::bad_alloc&) {
      is_refused = true;
    }
    has_no_memory = false;
    CHECK(is_refused);
    CHECK_EQUAL(num_mapped(), before);
    has_no_memory = true;
    while (!maps.empty()) maps.pop_back();
    has_no_memory = false;
  }
  CHECK_EQUAL(num_mapped(), 0);
}

// In a process of its own: what becomes of a fault outside every map, or of a SIGBUS that was sent.
TEST(faults_outside_of_maps_are_those_of_the_handler_before) {
  const RowsFile file;
  const MappedFile map = file.map("map.npy");
  const pid_t child = fork();
  if (child == 0) {
    raise(SIGBUS);
    _exit(0);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) != 0);  // a sanitizer's handler ends the process itself
}
