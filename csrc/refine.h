// Refinement: nodes move to the part that has most of their neighbours, or swap if both parts are full.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "clusters.h"
#include "labels.h"
#include "lists.h"

namespace hoploom {

// The part with most neighbours of a node, and the best part with room; the node's own part if none is better.
struct Wish {
  int16_t best, open;
};

// A node whose wished part was full.
struct WaitingNode {
  int64_t node, degree, type;
};

// Moves nodes pass by pass, block by block. All threads compute the wishes of a block's nodes from the state before the
// block; the moves are then made in order.
class Refinement {
 public:
  // parts: [num_nodes]; nodes with part limits.num_parts are not placed yet and are placed in the first pass.
  Refinement(const Graph& graph, const OutSamples& out, const Loads& limits, int16_t* parts);

  // One pass over all nodes; returns the number of moves. A random half may move and sees where the other half went:
  // neighbours that swap parts at the same time would gain nothing.
  int64_t pass(uint64_t key);
  // Moves nodes out of parts that are too full: first those that lose least, then any.
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
  uint64_t key_ = 0, half_ = 0;                                     // nodes whose random word has this bit may move
  std::vector<Wish> wishes_;                                        // of the block's nodes
  std::vector<int64_t> degrees_;                                    // of the block's nodes
  std::vector<std::vector<int32_t>> tallies_;                       // [threads][num_parts + 1]
  std::vector<int64_t> load_, other_load_;                          // [num_kinds]
  int64_t next_ = 0;                                                // part where the next search for room begins
  std::unordered_map<uint64_t, std::vector<WaitingNode>> waiting_;  // (from, to): nodes that found no room
  int64_t num_waiting_ = 0;
};

}  // namespace hoploom
