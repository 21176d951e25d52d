// Files mapped into memory, and what happens when one of them can no longer be read.
//
// Reading a map of a file that was truncated, or whose disk fails, sends SIGBUS, which ends the process. Here a handler
// puts zeroed pages in place of what cannot be read and marks the map as damaged; whoever has read it asks afterwards.
// Trades a check after every read, one load while all files are whole, for not ending a server with its store.
#pragma once
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

namespace hoploom {

struct MapEntry;  // of the list that the handler reads

// A file's pages, private: what is written to them stays in this process and counts against no limit. Keeps no
// descriptor: a store has more files than a process may have open. The path is for messages.
class MappedFile {
 public:
  MappedFile(int descriptor, size_t size,
             std::string path);  // throws std::system_error; the descriptor stays the caller's
  MappedFile(MappedFile&& other) noexcept
      : bytes_(std::exchange(other.bytes_, nullptr)), size_(other.size_), entry_(other.entry_) {}
  ~MappedFile();
  void* bytes() const { return bytes_; }
  size_t size() const { return size_; }
  void read_scattered() const;  // from now on the kernel reads what is asked for, and nothing around it

 private:
  void* bytes_ = nullptr;
  size_t size_ = 0;
  MapEntry* entry_ = nullptr;
};

// The kernel begins to read this memory, if it is a map of a file. For who goes through a map in order.
void read_soon(const void* begin, size_t bytes);

class DamagedFile : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Whether any map could not be read, of those there are.
bool any_damaged();

// Throws DamagedFile if one of these arrays lies in a map that could not be read. Null pointers are skipped.
void require_whole(std::span<const void* const> arrays);

// work() reads these arrays. That one of them is damaged goes before what work() threw: zeros may have misled it.
template <typename Work>
void read_maps(std::span<const void* const> arrays, Work work) {
  try {
    work();
  } catch (...) {
    require_whole(arrays);
    throw;
  }
  require_whole(arrays);
}

}  // namespace hoploom
