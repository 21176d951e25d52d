#include "lists.h"

#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>

namespace hoploom {

int64_t Topology::num_edges() const {
  int64_t total = 0;
  for (const InLists& held : lists) total += held.num_edges;
  return total;
}

namespace {

void check(const Topology& topology, const InLists& lists) {
  const int64_t end = lists.first_node + lists.num_lists;
  const auto type = std::upper_bound(topology.bounds.begin(), topology.bounds.end(), lists.first_node);
  const bool fits = lists.first_node >= 0 && lists.num_lists >= 0 && lists.num_edges >= 0 && lists.first_source >= 0 &&
                    lists.num_sources >= 0 && end <= topology.num_nodes() &&
                    lists.num_sources <= topology.num_nodes() - lists.first_source &&
                    (lists.num_lists == 0 || (type != topology.bounds.end() && end <= *type));
  if (!fits) throw std::out_of_range(lists.name + ": its lists do not fit the nodes");
}

constexpr int64_t kPiece = 256;              // nodes per thread at a time, in memory
constexpr int64_t kLeastPieces = 16;         // least pieces of a block, so that every thread gets some
constexpr int64_t kWindow = 4 << 20;         // bytes that a thread reads at a time from the files of one block
constexpr int64_t kLeastWindow = 256 << 10;  // bytes that it reads at least from one file

// Returns the number of nodes of a block whose lists take about a window, if they are read from files.
int64_t piece_of(const Block& block) {
  int64_t piece = kPiece;
  for (const InLists* lists : block.lists)
    if (!lists->indptr) {
      const int64_t list_bytes = 8 + lists->num_edges * (lists->wide ? 8 : 4) / std::max<int64_t>(1, lists->num_lists);
      piece = std::max(piece, kWindow / list_bytes);
    }
  return std::clamp<int64_t>((block.end - block.first) / kLeastPieces, kPiece, piece);
}

}  // namespace

std::vector<Block> blocks_of(const Topology& topology, int64_t at_least) {
  std::vector<int64_t> cuts = topology.bounds;
  for (const InLists& lists : topology.lists) {
    check(topology, lists);
    cuts.push_back(lists.first_node);
    cuts.push_back(lists.first_node + lists.num_lists);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  const int64_t size = std::max<int64_t>(1, topology.num_nodes() / std::max<int64_t>(1, at_least));
  std::vector<Block> blocks;
  for (size_t i = 0; i + 1 < cuts.size(); ++i)
    for (int64_t first = cuts[i]; first < cuts[i + 1]; first += size) {
      const auto type = std::upper_bound(topology.bounds.begin(), topology.bounds.end(), first);
      Block block{first, std::min(first + size, cuts[i + 1]), type - topology.bounds.begin() - 1, {}, kPiece};
      for (const InLists& lists : topology.lists)
        if (first >= lists.first_node && first < lists.first_node + lists.num_lists) block.lists.push_back(&lists);
      block.piece = piece_of(block);
      blocks.push_back(std::move(block));
    }
  return blocks;
}

void ListReader::open(const Topology& topology, const InLists& lists, int64_t first, int64_t end,
                      int64_t window_bytes) {
  topology_ = &topology;
  lists_ = &lists;
  first_ = first;
  const int64_t from = first - lists.first_node, count = end - first + 1;
  if (lists.indptr) {
    indptr_ = lists.indptr + from;
    sources_ = lists.indices;
    window_ = {0, lists.num_edges};
    return;
  }
  read_indptr_.resize(size_t(count));
  topology.read(2 * (&lists - topology.lists.data()), from * 8, count * 8, read_indptr_.data());
  indptr_ = read_indptr_.data();
  window_ = {0, 0};
  window_bytes_ = window_bytes;
  last_ = std::clamp<int64_t>(indptr_[count - 1], 0, lists.num_edges);
}

void ListReader::fill_window(int64_t begin) {
  const int64_t width = lists_->wide ? 8 : 4;
  window_ = {begin, std::min(std::max(last_, begin + 1), begin + window_bytes_ / width)};
  read_sources_.resize(size_t(window_.size() * width));
  topology_->read(2 * (lists_ - topology_->lists.data()) + 1, begin * width, window_.size() * width,
                  read_sources_.data());
  sources_ = read_sources_.data();
}

void PieceReader::open(const Topology& topology, const Block& block, int64_t first, int64_t end) {
  lists.resize(block.lists.size());
  const int64_t window_bytes = std::max(kLeastWindow, kWindow / std::max<int64_t>(1, int64_t(lists.size())));
  for (size_t i = 0; i < lists.size(); ++i) lists[i].open(topology, *block.lists[i], first, end, window_bytes);
}

namespace {

constexpr uintptr_t kAround = 128 << 10;  // a page fault also maps pages before the requested one

}  // namespace

void drop(const void* array, int64_t begin, int64_t end) {
  const auto base = reinterpret_cast<uintptr_t>(array), page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (base + page - 1) / page * page, wanted = (base + uintptr_t(begin)) / page * page;
  const uintptr_t from = std::max(first, wanted - std::min(wanted, kAround)),
                  to = (base + uintptr_t(end)) / page * page;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
}

void Faults::add(const InLists& lists, int64_t node, const std::string& what) {
  const std::lock_guard guard(mutex_);
  if (node >= node_) return;
  node_ = node;
  what_ = lists.name + ", list " + std::to_string(node - lists.first_node) + ": " + what;
}

void Faults::raise() const {
  if (node_ != INT64_MAX) throw std::out_of_range(what_);
}

}  // namespace hoploom
