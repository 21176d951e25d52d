#include "labels.h"

#include <array>
#include <atomic>

#include "random.h"

namespace hoploom {
namespace {

constexpr int64_t kSamples = 16;  // in-edges that vote; a power of two
constexpr int kRounds = 5;
constexpr int64_t kVotes = kSamples + OutSamples::kMost + 1;  // largest number of votes for a node
constexpr int64_t kGroup = 32;                                // nodes whose labels are fetched together
constexpr size_t kLocks = 4096;

// The most frequent of a few labels. Counts are in slots by a hash: two labels rarely share one, which is accepted for
// a loop without branches.
class Ballot {
 public:
  explicit Ballot(uint64_t largest_id) : id_bits_(largest_id > UINT32_MAX ? 40 : 32) {}
  void add(uint64_t label) { labels_[num_votes_++] = label; }
  // Returns the label with most votes among those that `is_open`; a hash decides between equals. The node's own label
  // has a vote, too: otherwise two nodes with no other neighbour would exchange their labels in every pass.
  template <typename IsOpen>
  uint64_t winner(uint64_t own, IsOpen is_open) {
    add(own);
    for (int i = 0; i < num_votes_; ++i) ++counts_[slot(labels_[i])];
    uint64_t best = 0;
    for (int i = 0; i < num_votes_; ++i) best = std::max(best, score(labels_[i]));
    if (label_of(best) != own && !is_open(label_of(best))) {
      best = score(own);
      for (int i = 0; i < num_votes_; ++i)
        if (is_open(labels_[i])) best = std::max(best, score(labels_[i]));
    }
    for (int i = 0; i < num_votes_; ++i) counts_[slot(labels_[i])] = 0;
    num_votes_ = 0;
    return label_of(best);
  }

 private:
  static uint32_t hash(uint64_t label) { return uint32_t(label ^ label >> 32) * 2654435761u; }
  static uint32_t slot(uint64_t label) { return hash(label) >> 21; }
  // Compare votes, then a hash, then the label itself.
  uint64_t score(uint64_t label) const {
    const uint64_t tie = uint64_t(hash(label)) & ((uint64_t(1) << (56 - id_bits_)) - 1);
    return uint64_t(counts_[slot(label)]) << 56 | tie << id_bits_ | label;
  }
  uint64_t label_of(uint64_t score) const { return score & ((uint64_t(1) << id_bits_) - 1); }

  int id_bits_;
  std::array<uint64_t, kVotes> labels_;
  std::array<uint8_t, 2048> counts_{};
  int num_votes_ = 0;
};

// Calls take(source) for all in-edges of a node, or for kSamples of them at equal distances.
template <typename Take>
void sample_sources(PieceReader& reader, int64_t node, uint64_t word, Faults& faults, Take take) {
  const int64_t degree = reader.degree_of(node, faults);
  const int64_t offset = degree > kSamples ? int64_t(word % uint64_t(degree)) : 0;
  int64_t before = 0, sample = 0;
  for (ListReader& lists : reader.lists) {
    const Span span = lists.span_of(node, faults);
    if (degree <= kSamples) lists.each_source(node, span, faults, take);
    else
      for (; sample < kSamples; ++sample) {
        const int64_t at = int64_t((uint64_t(sample) * uint64_t(degree) + uint64_t(offset)) / kSamples) - before;
        if (at >= span.size()) break;
        lists.each_source(node, {span.begin + at, span.begin + at + 1}, faults, take);
      }
    before += span.size();
  }
}

}  // namespace

void Graph::load_of(int64_t type, int64_t node, int64_t degree, int64_t* load) const {
  std::fill(load, load + num_kinds(), 0);
  load[type] = 1;
  load[topology.num_types()] = degree;
  load[topology.num_types() + 1] = is_seed(node);
}

OutSamples::OutSamples(const Graph& graph, uint64_t key, int64_t bytes) : key_(key) {
  bits_.resize(size_t(graph.topology.num_nodes() / 64 + 1));
  graph.each_degree([&](int64_t v, int64_t degree, const Block&) {
    if (degree >= kEnough) return;
    bits_[size_t(v / 64)] |= uint64_t(1) << (v % 64);
    ++num_rows_;
  });
  if (num_rows_ == 0) return;
  uint64_t before = 0;
  for (uint64_t word : bits_) {
    ranks_.push_back(before);
    before += uint64_t(__builtin_popcountll(word));
  }
  const int64_t width = graph.largest_id > UINT32_MAX ? 5 : 4;
  per_node_ = std::clamp<int64_t>(bytes / (num_rows_ * width), 1, kMost);
  ends_.emplace(num_rows_ * per_node_, graph.largest_id);
  if (ends_->is_wide()) locks_ = std::vector<std::mutex>(kLocks);
  Faults faults;
  for (const Block& block : graph.blocks)
    graph.share_out(block, [&](int, PieceReader& reader, int64_t first, int64_t end) {
      for (int64_t v = first; v < end; ++v)
        for (ListReader& lists : reader.lists)
          lists.each_source(v, lists.span_of(v, faults), faults, [&](int64_t source) {
            if (source != v && has(source)) keep(source, v);
          });
    });
  faults.raise();
}

// Each slot keeps the edge with the greatest word, in whatever order threads arrive.
void OutSamples::keep(int64_t source, int64_t destination) {
  const auto word_of = [&](uint64_t end) { return mix(key_ ^ uint64_t(source), end - 1); };
  const uint64_t end = uint64_t(destination) + 1, word = word_of(end);
  const int64_t slot = row_of(source) * per_node_ + int64_t(word % uint64_t(per_node_));
  if (ends_->is_wide()) {
    const std::lock_guard guard(locks_[size_t(slot) % kLocks]);
    const uint64_t held = (*ends_)[slot];
    if (held == 0 || word_of(held) < word) ends_->set(slot, end);
    return;
  }
  std::atomic_ref<uint32_t> kept(ends_->low(slot));
  uint32_t held = kept.load(std::memory_order_relaxed);
  while (held == 0 || word_of(held) < word)
    if (kept.compare_exchange_weak(held, uint32_t(end), std::memory_order_relaxed)) return;
}

namespace {

// The state of label propagation.
struct Clusters {
  IdArray labels;                // [num_nodes]
  IdArray held;                  // [num_nodes], by label: the weight of its cluster
  std::vector<uint64_t> closed;  // [num_nodes / 64 + 1], by label: whether a node of mean weight would be too much
  int64_t largest, usual;        // weight limit of a cluster, mean weight of a node

  bool is_open(uint64_t label) const { return !(closed[label / 64] >> (label % 64) & 1); }
  void grow(int64_t label, int64_t size) {
    const int64_t now = int64_t(held[label]) + size;
    held.set(label, uint64_t(now));
    const uint64_t bit = uint64_t(1) << (label % 64);
    if (now + usual > largest) closed[size_t(label / 64)] |= bit;
    else closed[size_t(label / 64)] &= ~bit;
  }
};

struct Task {
  const OutSamples& out;
  uint64_t key;
  Faults& faults;
};

// Computes the labels that the nodes [first, end) would change to. Reads all their sources first, so that the labels
// are prefetched.
void propose(const Task& task, PieceReader& reader, const Clusters& clusters, int64_t first, int64_t end,
             Ballot& ballot, uint64_t* wanted) {
  std::array<int64_t, kGroup * kVotes> sources;
  std::array<size_t, kGroup + 1> begins{};
  size_t count = 0;
  const auto note = [&](int64_t source) {
    clusters.labels.prefetch(source);
    sources[count++] = source;
  };
  for (int64_t v = first; v < end; ++v) {
    sample_sources(reader, v, mix(task.key, uint64_t(v)), task.faults, note);
    task.out.each(v, note);
    begins[size_t(v - first) + 1] = count;
  }
  for (int64_t v = first; v < end; ++v) {
    for (size_t i = begins[size_t(v - first)]; i < begins[size_t(v - first) + 1]; ++i)
      ballot.add(clusters.labels[sources[i]]);
    wanted[v - first] = ballot.winner(clusters.labels[v], [&](uint64_t label) { return clusters.is_open(label); });
  }
}

// Applies the changes that fit, in order.
void settle(const Block& block, const std::vector<uint64_t>& wanted, const std::vector<int64_t>& sizes,
            Clusters& clusters) {
  for (int64_t v = block.first; v < block.end; ++v) {
    const size_t i = size_t(v - block.first);
    const uint64_t own = clusters.labels[v], next = wanted[i];
    if (own == next || int64_t(clusters.held[int64_t(next)]) + sizes[i] > clusters.largest) continue;
    clusters.grow(int64_t(own), -sizes[i]);
    clusters.grow(int64_t(next), sizes[i]);
    clusters.labels.set(v, next);
  }
}

}  // namespace

IdArray propagate_labels(const Graph& graph, const OutSamples& out, const Sizes& sizes, int64_t whole, int64_t largest,
                         uint64_t key) {
  const int64_t num_nodes = graph.topology.num_nodes();
  Clusters clusters{IdArray(num_nodes, graph.largest_id), IdArray(num_nodes, uint64_t(whole)),
                    std::vector<uint64_t>(size_t(num_nodes / 64 + 1)), largest, 2 * sizes.per_node};
  graph.each_degree([&](int64_t v, int64_t degree, const Block&) {
    clusters.labels.set(v, uint64_t(v));
    clusters.grow(v, sizes.of(degree, graph.is_seed(v)));
  });
  std::vector<Ballot> ballots(graph.readers.size(), Ballot(graph.largest_id));
  std::vector<uint64_t> wanted;
  std::vector<int64_t> own_sizes;
  Faults faults;
  for (int round = 0; round < kRounds; ++round) {
    const Task task{out, mix(key, uint64_t(round)), faults};
    for (const Block& block : graph.blocks) {
      wanted.resize(size_t(block.end - block.first));
      own_sizes.resize(wanted.size());
      graph.share_out(block, [&](int thread, PieceReader& reader, int64_t begin, int64_t piece_end) {
        for (int64_t first = begin; first < piece_end; first += kGroup) {
          const int64_t end = std::min(first + kGroup, piece_end);
          propose(task, reader, clusters, first, end, ballots[size_t(thread)], &wanted[size_t(first - block.first)]);
          for (int64_t v = first; v < end; ++v)
            own_sizes[size_t(v - block.first)] = sizes.of(reader.degree_of(v, faults), graph.is_seed(v));
        }
      });
      settle(block, wanted, own_sizes, clusters);
    }
    faults.raise();
  }
  return std::move(clusters.labels);
}

}  // namespace hoploom
