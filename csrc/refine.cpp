#include "refine.h"

#include "random.h"

namespace hoploom {
namespace {

constexpr size_t kCandidates = 4;                               // waiting nodes that are tried for a swap
constexpr int64_t kWaitingShare = 32, kLeastWaiting = 1 << 20;  // at most one node in 32 waits, or 1 Mi nodes

uint64_t way(int64_t from, int64_t to) { return uint64_t(from) << 32 | uint64_t(to); }

}  // namespace

Refinement::Refinement(const Graph& graph, const OutSamples& out, const Loads& limits, int16_t* parts)
    : graph_(graph),
      out_(out),
      loads_(limits),
      parts_(parts),
      tallies_(graph.readers.size(), std::vector<int32_t>(size_t(limits.num_parts) + 1)),
      load_(size_t(graph.num_kinds())),
      other_load_(load_) {
  graph.each_degree([&](int64_t v, int64_t degree, const Block& block) {
    if (parts_[v] == loads_.num_parts) return;
    graph_.load_of(block.type, v, degree, load_.data());
    loads_.add(parts_[v], load_.data());
  });
}

int64_t Refinement::pass(uint64_t key) { return run(Aim::kFewerCuts, key, 0) + run(Aim::kFewerCuts, key, 1); }

void Refinement::relieve() {
  if (any_over()) run(Aim::kReliefAtSmallLoss, 0, 0);
  if (any_over()) run(Aim::kRelief, 0, 0);
}

bool Refinement::may_move(int64_t node, Aim aim) const {
  return aim != Aim::kFewerCuts || (mix(key_, uint64_t(node)) & 1) == half_;
}

int64_t Refinement::run(Aim aim, uint64_t key, uint64_t half) {
  int64_t moves = 0;
  key_ = key;
  half_ = half;
  waiting_.clear();
  num_waiting_ = 0;
  for (const Block& block : graph_.blocks) {
    propose(block, aim);
    for (int64_t v = block.first; v < block.end; ++v)
      if (may_move(v, aim)) moves += grant(block, v, aim);
  }
  faults_.raise();
  return moves;
}

void Refinement::propose(const Block& block, Aim aim) {
  wishes_.resize(size_t(block.end - block.first));
  degrees_.resize(wishes_.size());
  graph_.share_out(block, [&](int thread, PieceReader& reader, int64_t first, int64_t end) {
    std::vector<int64_t> load(load_.size());
    for (int64_t v = first; v < end; ++v)
      if (may_move(v, aim)) wish(reader, block, v, aim, tallies_[size_t(thread)], load);
  });
}

void Refinement::wish(PieceReader& reader, const Block& block, int64_t node, Aim aim, std::vector<int32_t>& counts,
                      std::vector<int64_t>& load) {
  const int16_t own = parts_[node];
  std::fill(counts.begin(), counts.end(), 0);
  const auto count = [&](int64_t neighbour) { ++counts[size_t(parts_[neighbour])]; };
  int64_t degree = 0;
  for (ListReader& lists : reader.lists) {
    const Span span = lists.span_of(node, faults_);
    lists.each_source(node, span, faults_, count);
    degree += span.size();
  }
  out_.each(node, count);
  counts[size_t(loads_.num_parts)] = 0;
  degrees_[size_t(node - block.first)] = degree;
  graph_.load_of(block.type, node, degree, load.data());
  Wish wish{own, own};
  int32_t most = counts[size_t(own)], most_open = most;
  if (aim != Aim::kFewerCuts) most_open = aim == Aim::kRelief ? -1 : (most - 1) / 2;
  for (int64_t p = 0; p < loads_.num_parts; ++p) {
    const int32_t votes = counts[size_t(p)];
    if (votes > most) wish.best = int16_t(p), most = votes;
    if (votes > most_open && p != own && loads_.has_room(p, load.data())) wish.open = int16_t(p), most_open = votes;
  }
  wishes_[size_t(node - block.first)] = wish;
}

bool Refinement::grant(const Block& block, int64_t node, Aim aim) {
  const Wish wish = wishes_[size_t(node - block.first)];
  const int16_t own = parts_[node];
  if (own != loads_.num_parts && wish.best == own && wish.open == own) return false;
  const int64_t degree = degrees_[size_t(node - block.first)];
  graph_.load_of(block.type, node, degree, load_.data());
  if (own == loads_.num_parts) return settle(node, wish.open);
  if (aim != Aim::kFewerCuts) return loads_.is_over(own, load_.data()) && move(node, wish.open);
  if (move(node, wish.best) || swap(node, wish.best) || move(node, wish.open)) return true;
  waiting_[way(own, wish.best)].push_back({node, degree, block.type});
  if (++num_waiting_ > std::max(kLeastWaiting, graph_.topology.num_nodes() / kWaitingShare)) forget_oldest();
  return false;
}

// Drops the second half of the nodes that wait for the same move: the last ones are tried first.
void Refinement::forget_oldest() {
  num_waiting_ = 0;
  for (auto& [_, waiting] : waiting_) {
    waiting.erase(waiting.begin(), waiting.begin() + int64_t(waiting.size() / 2));
    num_waiting_ += int64_t(waiting.size());
  }
}

// Places a node without a part: where it wishes, else in the next part with room.
bool Refinement::settle(int64_t node, int64_t part) {
  if (part == loads_.num_parts || !loads_.has_room(part, load_.data())) {
    part = next_;
    for (int64_t tried = 0; tried < loads_.num_parts && !loads_.has_room(part, load_.data()); ++tried)
      part = (part + 1) % loads_.num_parts;
    next_ = (part + 1) % loads_.num_parts;
  }
  loads_.add(part, load_.data());
  parts_[node] = int16_t(part);
  return true;
}

bool Refinement::move(int64_t node, int64_t part) {
  if (part == parts_[node] || !loads_.has_room(part, load_.data())) return false;
  loads_.add(parts_[node], load_.data(), -1);
  loads_.add(part, load_.data());
  parts_[node] = int16_t(part);
  return true;
}

// Swaps with a node that waits for the opposite move, if neither part then exceeds its limits.
bool Refinement::swap(int64_t node, int64_t part) {
  const int16_t own = parts_[node];
  const auto found = waiting_.find(way(part, own));
  if (found == waiting_.end()) return false;
  auto& waiting = found->second;
  for (size_t i = 1; i <= std::min(kCandidates, waiting.size()); ++i) {
    const auto [other, degree, type] = waiting[waiting.size() - i];
    graph_.load_of(type, other, degree, other_load_.data());
    loads_.add(own, load_.data(), -1);
    loads_.add(part, other_load_.data(), -1);
    const bool fits = loads_.has_room(part, load_.data()) && loads_.has_room(own, other_load_.data());
    loads_.add(fits ? part : own, load_.data());
    loads_.add(fits ? own : part, other_load_.data());
    if (!fits) continue;
    parts_[node] = int16_t(part);
    parts_[other] = own;
    waiting.erase(waiting.end() - int64_t(i));
    --num_waiting_;
    return true;
  }
  return false;
}

bool Refinement::any_over() const {
  const std::vector<int64_t> all(load_.size(), 1);
  for (int64_t p = 0; p < loads_.num_parts; ++p)
    if (loads_.is_over(p, all.data())) return true;
  return false;
}

}  // namespace hoploom
