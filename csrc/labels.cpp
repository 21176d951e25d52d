#include "labels.h"

#include <array>
#include <atomic>
#include <numeric>

#include "random.h"

namespace hoploom {
namespace {

constexpr int64_t kSamples = 16;  // in-edges that vote; a power of two
constexpr int kRounds = 5;
constexpr int64_t kVotes = kSamples + OutSamples::kKept + 1;  // the most that a node gets
constexpr int64_t kGroup = 32;                                // nodes whose labels are fetched together
constexpr int64_t kPiece = 256;                               // nodes that a thread takes at a time

// The most frequent of a few labels. Counts lie in slots by a hash: that two labels share one is rare, and the price
// for a loop without branches.
class Ballot {
 public:
  void add(uint32_t label) { labels_[num_votes_++] = label; }
  // The label with most votes that `is_open`; of equals the one that all nodes would choose. The own label has
  // a vote, too: two nodes that have only each other would exchange their labels for ever.
  template <typename IsOpen>
  uint32_t winner(uint32_t own, IsOpen is_open) {
    add(own);
    for (int i = 0; i < num_votes_; ++i) ++counts_[slot(labels_[i])];
    uint64_t best = 0;
    for (int i = 0; i < num_votes_; ++i) best = std::max(best, score(labels_[i]));
    if (uint32_t(best) != own && !is_open(uint32_t(best))) {
      best = score(own);
      for (int i = 0; i < num_votes_; ++i)
        if (is_open(labels_[i])) best = std::max(best, score(labels_[i]));
    }
    for (int i = 0; i < num_votes_; ++i) counts_[slot(labels_[i])] = 0;
    num_votes_ = 0;
    return uint32_t(best);
  }

 private:
  static uint32_t hash(uint32_t label) { return label * 2654435761u; }
  static uint32_t slot(uint32_t label) { return hash(label) >> 21; }
  uint64_t score(uint32_t label) const {
    return uint64_t(counts_[slot(label)]) << 56 | uint64_t(hash(label) & 0xFFFFFF) << 32 | label;
  }
  std::array<uint32_t, kVotes> labels_;
  std::array<uint8_t, 2048> counts_{};
  int num_votes_ = 0;
};

// take(source) for all in-edges of a node, or for kSamples of them at equal distances.
template <typename Take>
void sample_sources(const Block& block, int64_t node, uint64_t word, Faults& faults, Take take) {
  const int64_t degree = degree_of(block, node, faults);
  const int64_t offset = degree > kSamples ? int64_t(word % uint64_t(degree)) : 0;
  int64_t before = 0, sample = 0;
  for (const InLists* lists : block.lists) {
    const Span span = span_of(*lists, node, faults);
    if (degree <= kSamples) read_sources(*lists, node, span, faults, take);
    else
      for (; sample < kSamples; ++sample) {
        const int64_t at = int64_t((uint64_t(sample) * uint64_t(degree) + uint64_t(offset)) / kSamples) - before;
        if (at >= span.size()) break;
        read_sources(*lists, node, {span.begin + at, span.begin + at + 1}, faults, take);
      }
    before += span.size();
  }
}

}  // namespace

OutSamples::OutSamples(const Topology& topology, const std::vector<Block>& blocks, uint64_t key, int threads)
    : key_(key) {
  Faults faults;
  std::vector<uint32_t> rows(size_t(topology.num_nodes()), kNone);
  uint32_t count = 0;
  for (const Block& block : blocks) {
    for (int64_t v = block.first; v < block.end; ++v)
      if (degree_of(block, v, faults) < kEnough) rows[size_t(v)] = count++;
    let_go(block, block.first, block.end);
  }
  faults.raise();
  if (count == 0) return;
  rows_ = std::move(rows);
  ends_.assign(size_t(count) * kKept, kNone);
  for (const Block& block : blocks) {
    share_out(block.first, block.end, kPiece, threads, [&](int, int64_t first, int64_t end) {
      for (int64_t v = first; v < end; ++v)
        for (const InLists* lists : block.lists)
          read_sources(*lists, v, span_of(*lists, v, faults), faults, [&](int64_t source) {
            if (rows_[size_t(source)] != kNone && source != v) keep(uint32_t(source), uint32_t(v));
          });
      let_go(block, first, end, kMany);
    });
    let_go(block, block.first, block.end);
  }
  faults.raise();
}

// Each slot keeps the edge with the greatest word, whichever thread comes first.
void OutSamples::keep(uint32_t source, uint32_t destination) {
  const auto word_of = [&](uint32_t end) { return mix(key_ ^ source, end); };
  const uint64_t word = word_of(destination);
  std::atomic_ref<uint32_t> slot(ends_[size_t(rows_[source]) * kKept + word % kKept]);
  uint32_t held = slot.load(std::memory_order_relaxed);
  while (held == kNone || word_of(held) < word)
    if (slot.compare_exchange_weak(held, destination, std::memory_order_relaxed)) return;
}

namespace {

// The state of label propagation.
struct Clusters {
  ZeroedArray<uint32_t> labels;  // [num_nodes]
  ZeroedArray<int64_t> held;     // [num_nodes], by label: the size of its cluster
  ZeroedArray<uint64_t> closed;  // [num_nodes / 64 + 1], by label: whether a node of mean size would be too much
  int64_t largest, usual;        // sizes

  bool is_open(uint32_t label) const { return !(closed[label / 64] >> (label % 64) & 1); }
  void grow(uint32_t label, int64_t size) {
    held[label] += size;
    const uint64_t bit = uint64_t(1) << (label % 64);
    if (held[label] + usual > largest) closed[label / 64] |= bit;
    else closed[label / 64] &= ~bit;
  }
};

struct Task {
  const Block& block;
  const OutSamples& out;
  uint64_t key;
  Faults& faults;
};

// The labels that the nodes [first, end) would rather have. Reads the sources of all of them first, so that the labels
// are on their way when they are asked for.
void propose(const Task& task, const Clusters& clusters, int64_t first, int64_t end, Ballot& ballot, uint32_t* wanted) {
  std::array<uint32_t, kGroup * kVotes> sources;
  std::array<size_t, kGroup + 1> begins{};
  size_t count = 0;
  const auto note = [&](int64_t source) {
    __builtin_prefetch(&clusters.labels[source]);
    sources[count++] = uint32_t(source);
  };
  for (int64_t v = first; v < end; ++v) {
    sample_sources(task.block, v, mix(task.key, uint64_t(v)), task.faults, note);
    task.out.each(v, note);
    begins[size_t(v - first) + 1] = count;
  }
  for (int64_t v = first; v < end; ++v) {
    for (size_t i = begins[size_t(v - first)]; i < begins[size_t(v - first) + 1]; ++i)
      ballot.add(clusters.labels[sources[i]]);
    wanted[v - first] = ballot.winner(clusters.labels[v], [&](uint32_t label) { return clusters.is_open(label); });
  }
}

// Those that find room move, in order.
void settle(const Block& block, const std::vector<uint32_t>& wanted, const std::vector<int64_t>& sizes,
            Clusters& clusters) {
  for (int64_t v = block.first; v < block.end; ++v) {
    const size_t i = size_t(v - block.first);
    const uint32_t own = clusters.labels[v], next = wanted[i];
    if (own == next || clusters.held[next] + sizes[i] > clusters.largest) continue;
    clusters.grow(own, -sizes[i]);
    clusters.grow(next, sizes[i]);
    clusters.labels[v] = next;
  }
}

}  // namespace

ZeroedArray<uint32_t> propagate_labels(const std::vector<Block>& blocks, const OutSamples& out, const uint8_t* is_seed,
                                       const Sizes& sizes, int64_t largest, uint64_t key, int threads) {
  const int64_t num_nodes = blocks.empty() ? 0 : blocks.back().end;
  Faults faults;
  Clusters clusters{ZeroedArray<uint32_t>(num_nodes), ZeroedArray<int64_t>(num_nodes),
                    ZeroedArray<uint64_t>(num_nodes / 64 + 1), largest, 2 * sizes.per_node};
  std::iota(clusters.labels.begin(), clusters.labels.end(), 0u);
  const auto size_of = [&](const Block& block, int64_t v) {
    return sizes.of(degree_of(block, v, faults), is_seed && is_seed[v]);
  };
  std::fill(clusters.closed.begin(), clusters.closed.end(), 0);
  for (const Block& block : blocks) {
    for (int64_t v = block.first; v < block.end; ++v)
      clusters.held[v] = 0, clusters.grow(uint32_t(v), size_of(block, v));
    let_go(block, block.first, block.end);
  }
  std::vector<Ballot> ballots(static_cast<size_t>(threads));
  std::vector<uint32_t> wanted;
  std::vector<int64_t> own_sizes;
  for (int round = 0; round < kRounds; ++round) {
    for (const Block& block : blocks) {
      wanted.resize(size_t(block.end - block.first));
      own_sizes.resize(wanted.size());
      const Task task{block, out, mix(key, uint64_t(round)), faults};
      share_out(block.first, block.end, kGroup, threads, [&](int thread, int64_t first, int64_t end) {
        propose(task, clusters, first, end, ballots[size_t(thread)], &wanted[size_t(first - block.first)]);
        for (int64_t v = first; v < end; ++v) own_sizes[size_t(v - block.first)] = size_of(block, v);
        let_go(block, first, end, kMany);
      });
      settle(block, wanted, own_sizes, clusters);
      let_go(block, block.first, block.end);
    }
    faults.raise();
  }
  return std::move(clusters.labels);
}

}  // namespace hoploom
