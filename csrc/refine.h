// Refinement: nodes move to the part where most of their neighbours are, or swap places where both parts are full.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "clusters.h"
#include "labels.h"
#include "lists.h"

namespace hoploom {

// Where a node has most neighbours, and where it has most among parts with room; its own part unless that is better.
struct Wish {
  int16_t best, open;
};

// A node that found no room.
struct WaitingNode {
  int64_t node, degree, type;
};

// Moves nodes pass by pass, block by block: what a block's nodes wish is found by all threads from what was before the
// block, and granted in order.
class Refinement {
 public:
  // parts: [num_nodes]; a node with part limits.num_parts has none yet and gets one in the first pass.
  Refinement(const Graph& graph, const OutSamples& out, const Loads& limits, int16_t* parts);

  // Every node once; half of them, drawn afresh, see where the other half went: neighbours that change places at the
  // same time gain nothing. Returns how many moved.
  int64_t pass(uint64_t key);
  // Moves nodes out of parts that are too full: those that lose least, then any.
  void relieve();

 private:
  enum class Aim { kFewerCuts, kReliefAtSmallLoss, kRelief };
  int64_t run(Aim aim, uint64_t key, uint64_t half);
  void propose(const Block& block, Aim aim);
  void wish(PieceReader& reader, const Block& block, int64_t node, Aim aim, std::vector<int32_t>& counts,
            std::vector<int64_t>& load);
  bool grant(const Block& block, int64_t node, Aim aim);
  void forget_oldest();
  bool settle(int64_t node, int64_t part);
  bool move(int64_t node, int64_t part);
  bool swap(int64_t node, int64_t part);
  bool may_move(int64_t node, Aim aim) const;
  bool any_over() const;

  const Graph& graph_;
  const OutSamples& out_;
  Loads loads_;
  int16_t* parts_;
  Faults faults_;
  uint64_t key_ = 0, half_ = 0;                                     // who may move: those whose word has this last bit
  std::vector<Wish> wishes_;                                        // of the block's nodes
  std::vector<int64_t> degrees_;                                    // of the block's nodes
  std::vector<std::vector<int32_t>> tallies_;                       // [threads][num_parts + 1]
  std::vector<int64_t> load_, other_load_;                          // [num_kinds]
  int64_t next_ = 0;                                                // where the search for room goes on
  std::unordered_map<uint64_t, std::vector<WaitingNode>> waiting_;  // (from, to): nodes that found no room
  int64_t num_waiting_ = 0;
};

}  // namespace hoploom
