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
      Block block{first, std::min(first + size, cuts[i + 1]), type - topology.bounds.begin() - 1, {}};
      for (const InLists& lists : topology.lists)
        if (first >= lists.first_node && first < lists.first_node + lists.num_lists) block.lists.push_back(&lists);
      blocks.push_back(std::move(block));
    }
  return blocks;
}

namespace {

constexpr uintptr_t kAround = 128 << 10;  // a fault maps pages before the one asked for, too

}  // namespace

void drop(const void* array, int64_t begin, int64_t end) {
  const auto base = reinterpret_cast<uintptr_t>(array), page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (base + page - 1) / page * page, wanted = (base + uintptr_t(begin)) / page * page;
  const uintptr_t from = std::max(first, wanted - std::min(wanted, kAround)),
                  to = (base + uintptr_t(end)) / page * page;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
}

void let_go(const Block& block, int64_t first, int64_t end, int64_t at_least) {
  for (const InLists* lists : block.lists) {
    if (!lists->mapped) continue;
    const int64_t from = first - lists->first_node, to = end - lists->first_node, width = lists->wide ? 8 : 4;
    const int64_t begins = std::clamp<int64_t>(lists->indptr[from], 0, lists->num_edges) * width;
    const int64_t ends = std::clamp<int64_t>(lists->indptr[to], 0, lists->num_edges) * width;
    if (ends - begins < at_least) continue;
    drop(lists->indices, begins, ends);
    drop(lists->indptr, from * 8, to * 8);
  }
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
