// Files mapped into memory, and handling of those that become unreadable.
//
// Reading a map of a file that was truncated, or whose disk fails, raises SIGBUS, which ends the process. This handler
// replaces unreadable pages by zeroed ones and marks the map as damaged; readers check the mark afterwards.
// Costs a check after every read (one load while no file is damaged); a server survives a damaged store.
#pragma once
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

namespace hoploom {

struct MapEntry;  // an entry of the list that the handler reads

// A file's pages, mapped privately: writes stay in this process. The map counts against no memory limit and keeps no
// descriptor, because a store has more files than a process may open. The path is for messages.
class MappedFile {
 public:
  MappedFile(int descriptor, size_t size,
             std::string path);  // throws std::system_error; the descriptor stays the caller's
  MappedFile(MappedFile&& other) noexcept
      : bytes_(std::exchange(other.bytes_, nullptr)), size_(other.size_), entry_(other.entry_) {}
  ~MappedFile();
  void* bytes() const { return bytes_; }
  size_t size() const { return size_; }
  void read_scattered() const;  // tells the kernel to read only requested pages, without read-ahead

 private:
  void* bytes_ = nullptr;
  size_t size_ = 0;
  MapEntry* entry_ = nullptr;
};

// Starts reading this memory ahead if it is a map of a file; for sequential readers.
void read_soon(const void* begin, size_t bytes);

class DamagedFile : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns whether any existing map is damaged.
bool any_damaged();

// Throws DamagedFile if one of these arrays is in a damaged map. Skips null pointers.
void require_whole(std::span<const void* const> arrays);

// Calls work(), which reads these arrays. DamagedFile takes precedence over what work() throws: it may have read zeros.
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
