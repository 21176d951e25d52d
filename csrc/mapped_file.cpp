#include "mapped_file.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>

namespace hoploom {

// One map. Entries are reused, never freed, so that a handler may read them at any moment.
struct MapEntry {
  std::atomic<uint32_t> version{0};  // odd while the entry changes
  std::atomic<uintptr_t> begin{0}, end{0};
  std::atomic<bool> is_damaged{false};
  std::string path;
  MapEntry* next = nullptr;         // in the list of all entries
  MapEntry* next_unused = nullptr;  // under the registry's mutex
};

namespace {

std::atomic<MapEntry*> all_entries{nullptr};
std::atomic<int64_t> num_damaged{0};  // number of existing maps that are damaged
uintptr_t page_size = 4096;
struct sigaction previous;

// Safe in a signal handler: takes no lock and allocates nothing. An entry that is being changed is not the map in use.
MapEntry* entry_of(uintptr_t address) {
  for (MapEntry* entry = all_entries.load(); entry; entry = entry->next) {
    const uint32_t version = entry->version.load();
    const bool holds = entry->begin.load() <= address && address < entry->end.load();
    if (holds && version % 2 == 0 && entry->version.load() == version) return entry;
  }
  return nullptr;
}

// The fault is not in our maps: restore the previous handler.
void pass_on(int signal, siginfo_t* info, void* context) {
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(signal, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(signal);
  sigaction(signal, &previous, nullptr);
  if (info->si_code <= 0) raise(signal);  // sent by a process; a real fault happens again by itself
}

// Replaces the pages from the unreadable one to the end of the file: at most one further mapping per map.
void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  MapEntry* entry = info->si_code > 0 ? entry_of(address) : nullptr;
  if (!entry) return pass_on(signal, info, context);
  if (!entry->is_damaged.exchange(true)) num_damaged.fetch_add(1);
  const uintptr_t page = address / page_size * page_size;
  void* zeros = mmap(reinterpret_cast<void*>(page), entry->end.load() - page, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (zeros == MAP_FAILED) pass_on(signal, info, context);
  errno = error;
}

void install_handler() {
  page_size = uintptr_t(sysconf(_SC_PAGESIZE));
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &previous);
}

// Never destroyed: maps may outlive every other static at interpreter exit.
struct Registry {
  std::mutex mutex;
  MapEntry* unused = nullptr;  // reusable entries, linked in advance: freeing an entry must not allocate
};
Registry& registry() {
  static Registry* instance = (install_handler(), new Registry);
  return *instance;
}

MapEntry* add_entry(const void* bytes, size_t size, std::string path) {
  Registry& entries = registry();
  const std::lock_guard guard(entries.mutex);
  if (!entries.unused) {
    entries.unused = new MapEntry;
    entries.unused->next = all_entries.load();
    all_entries.store(entries.unused);
  }
  MapEntry* entry = entries.unused;
  entries.unused = entry->next_unused;
  entry->path = std::move(path);
  entry->version.fetch_add(1);
  entry->begin.store(reinterpret_cast<uintptr_t>(bytes));
  entry->end.store(reinterpret_cast<uintptr_t>(bytes) + size);
  entry->version.fetch_add(1);
  return entry;
}

void remove_entry(MapEntry* entry) {
  Registry& entries = registry();
  entry->version.fetch_add(1);
  entry->begin.store(0);
  entry->end.store(0);
  entry->version.fetch_add(1);
  if (entry->is_damaged.exchange(false)) num_damaged.fetch_sub(1);
  const std::lock_guard guard(entries.mutex);
  entry->next_unused = entries.unused;
  entries.unused = entry;
}

}  // namespace

MappedFile::MappedFile(int descriptor, size_t size, std::string path) : size_(size) {
  void* pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
  if (pages == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  madvise(pages, size, MADV_HUGEPAGE);  // huge pages make look-ups cheaper, if the file system has them
  try {
    entry_ = add_entry(pages, size, std::move(path));
  } catch (...) {  // an object whose constructor throws has no destructor call
    munmap(pages, size);
    throw;
  }
  bytes_ = pages;
}

MappedFile::~MappedFile() {
  if (!bytes_) return;
  remove_entry(entry_);
  munmap(bytes_, size_);
}

void MappedFile::read_scattered() const {
  madvise(bytes_, size_,
          MADV_NOHUGEPAGE);  // else each fault reads a huge page. Only a hint, so the result is ignored
  madvise(bytes_, size_, MADV_RANDOM);
}

void read_soon(const void* begin, size_t bytes) {
  constexpr size_t kAtOnce = 1 << 20;  // the kernel takes only the beginning of a longer range
  const uintptr_t end = reinterpret_cast<uintptr_t>(begin) + bytes;
  for (uintptr_t at = reinterpret_cast<uintptr_t>(begin) / page_size * page_size; at < end; at += kAtOnce)
    madvise(reinterpret_cast<void*>(at), std::min<size_t>(kAtOnce, end - at), MADV_WILLNEED);
}

bool any_damaged() {
  std::atomic_thread_fence(std::memory_order_acquire);  // earlier reads happen before the mark is read
  return num_damaged.load(std::memory_order_relaxed) != 0;
}

void require_whole(std::span<const void* const> arrays) {
  if (!any_damaged()) return;
  for (const void* array : arrays) {
    const MapEntry* entry = array ? entry_of(reinterpret_cast<uintptr_t>(array)) : nullptr;
    if (entry && entry->is_damaged.load())
      throw DamagedFile(entry->path +
                        " cannot be read any more: it was truncated or replaced while it was open, or its disk fails; "
                        "restore the file, check the store with `hoploom check`, and open it again");
  }
}

}  // namespace hoploom
