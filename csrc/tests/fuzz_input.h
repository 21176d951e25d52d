// Bytes read as one call of the core: a small graph, sound or damaged, a frontier and a rule.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "graphs.h"

namespace hoploom::test {

// Reads zeros once the bytes are used up.
class ByteReader {
 public:
  ByteReader(const uint8_t* bytes, size_t size) : bytes_(bytes), left_(size) {}

  uint64_t raw() {
    uint64_t value = 0;
    const size_t width = std::min<size_t>(8, left_);
    if (width) std::memcpy(&value, bytes_, width);
    bytes_ += width, left_ -= width;
    return value;
  }
  uint8_t byte() {
    if (!left_) return 0;
    --left_;
    return *bytes_++;
  }
  int64_t below(int limit) { return limit > 0 ? byte() % limit : 0; }
  bool one_in(int chances) { return byte() % chances == chances - 1; }
  template <typename T>
  T any_of(const std::vector<T>& menu) {
    return menu[size_t(byte()) % menu.size()];
  }

 private:
  const uint8_t* bytes_;
  size_t left_;
};

struct Input {
  Graph graph;
  bool wide_ids;
  int64_t num_sources;        // ids a sound graph may name
  std::vector<float> weight;  // empty: none; so below
  std::vector<int64_t> edge_time, source_time;
  std::vector<int64_t> nodes, trees, times;
  bool with_frontier_times;
  std::vector<int64_t> excluded;  // ascending, unless damaged
  Rule rule;
  uint64_t salt;

  Adjacency adjacency() const { return graph.adjacency(wide_ids); }
  EdgeColumns columns() const {
    EdgeColumns columns;
    if (!weight.empty()) columns.weight = weight.data();
    if (!edge_time.empty()) columns.edge_time = edge_time.data();
    if (!source_time.empty()) columns.source_time = source_time.data();
    columns.num_sources = int64_t(source_time.size());
    return columns;
  }
  Frontier frontier() const {
    return frontier_of(nodes, trees.empty() ? nullptr : &trees, with_frontier_times ? &times : nullptr);
  }
};

void check_aggregation(ByteReader& reader);  // fuzz_aggregate.cpp

inline int64_t degree_from(ByteReader& reader) {
  const int64_t choice = reader.byte();
  if (choice < 160) return choice % 12;
  return choice < 240 ? choice - 160 : choice * 2;
}

inline int64_t damaged_id(ByteReader& reader) {
  const auto id = int64_t(reader.raw());
  return reader.any_of<int64_t>({id, id % 100, -1, INT64_MIN, INT64_MAX});
}

inline void read_graph(ByteReader& reader, Input& input) {
  Graph& graph = input.graph;
  input.num_sources = (1 + reader.below(60)) * reader.any_of<int64_t>({1, 1, 1, 50});
  input.wide_ids = reader.one_in(2);
  const int64_t num_nodes = reader.below(24);
  for (int64_t v = 0; v < num_nodes; ++v) {
    std::vector<int64_t> list = scattered(degree_from(reader), input.num_sources, input.salt + uint64_t(v));
    if (reader.one_in(4)) std::sort(list.begin(), list.end());
    graph.append(list);
  }
  if (num_nodes && reader.one_in(250)) graph.append(scattered(65530 + reader.byte(), input.num_sources, input.salt));
  graph.first_node = reader.any_of<int64_t>({0, 0, 5, int64_t(1) << 40});
  graph.first_edge = reader.any_of<int64_t>({0, 1000, int64_t(1) << 40});
  if (reader.one_in(4))
    for (int64_t i = 1 + reader.below(3); i > 0; --i)
      graph.indptr[reader.raw() % graph.indptr.size()] =
          reader.one_in(2) ? int64_t(reader.raw()) : int64_t(reader.raw() % uint64_t(graph.num_edges() + 2));
  if (reader.one_in(4) && graph.num_edges()) {
    const size_t at = reader.raw() % graph.sources.size();
    graph.sources[at] = damaged_id(reader);
    graph.narrow_sources[at] = int32_t(graph.sources[at]);
  }
}

inline float any_weight(ByteReader& reader) {
  using Limits = std::numeric_limits<float>;
  return reader.any_of<float>({0, 0, 0, 1, 1, 2, 0.3f, 1e-30f, 1e30f, -1, Limits::quiet_NaN(), Limits::infinity(),
                               -Limits::infinity(), Limits::denorm_min(), Limits::max(), -0.0f});
}

inline void read_columns(ByteReader& reader, Input& input) {
  const size_t num_edges = input.graph.sources.size();
  if (reader.one_in(3)) {
    std::vector<float> menu;
    for (int i = 0; i < 4; ++i) menu.push_back(any_weight(reader));
    for (int64_t choice : scattered(int64_t(num_edges), 4, input.salt + 1))
      input.weight.push_back(menu[size_t(choice)]);
  }
  if (reader.one_in(3)) {
    input.edge_time = scattered(int64_t(num_edges), 1 + reader.byte(), input.salt + 2);
    if (reader.one_in(2)) std::sort(input.edge_time.begin(), input.edge_time.end());
    if (reader.one_in(8) && num_edges) input.edge_time[reader.raw() % num_edges] = int64_t(reader.raw());
  }
  if (reader.one_in(3)) {
    input.source_time = scattered(input.num_sources, 1 + reader.byte(), input.salt + 3);
    if (reader.one_in(2)) std::sort(input.source_time.begin(), input.source_time.end());
    if (reader.one_in(8)) input.source_time.pop_back();
  }
}

inline void read_frontier(ByteReader& reader, Input& input) {
  const int64_t size = input.graph.num_nodes() ? reader.below(50) : reader.below(2);
  for (int64_t i = 0; i < size; ++i)
    input.nodes.push_back(input.graph.first_node + reader.below(int(input.graph.num_nodes())));
  if (size && reader.one_in(8)) input.nodes[reader.raw() % input.nodes.size()] = damaged_id(reader);
  if (reader.one_in(3)) input.trees = scattered(size, 3, input.salt + 4);
  input.with_frontier_times = reader.one_in(2);
  input.times = scattered(size, 1 + reader.byte(), input.salt + 5);
  if (size && reader.one_in(8)) input.times[0] = int64_t(reader.raw());
}

inline void read_excluded(ByteReader& reader, Input& input) {
  if (!reader.one_in(2)) return;
  const int64_t first = input.graph.first_edge, num_edges = input.graph.num_edges();
  for (int64_t position = first - 2; position < first + num_edges + 2; position += 1 + reader.below(6))
    input.excluded.push_back(position);
  if (reader.one_in(8)) input.excluded[reader.raw() % input.excluded.size()] = damaged_id(reader);
  input.rule.excluded = input.excluded.data();
  input.rule.num_excluded = int64_t(input.excluded.size());
}

inline Input read_input(ByteReader& reader) {
  Input input{};
  input.salt = reader.raw();
  input.rule.key = reader.raw();
  input.rule.stream = uint32_t(reader.raw());
  input.rule.fanout =
      reader.one_in(4) ? reader.any_of<int64_t>({0, 63, 64, 65, 66, 300, -1, -1}) : 1 + reader.below(20);
  input.rule.replace = reader.one_in(3);
  input.rule.last = reader.one_in(3);
  input.rule.labor = reader.one_in(4);
  if (!input.rule.replace && reader.one_in(16)) input.rule.fanout = INT64_MAX;
  read_graph(reader, input);
  read_columns(reader, input);
  read_frontier(reader, input);
  if (reader.one_in(3)) input.rule.window = reader.any_of<int64_t>({0, 1, 5, 50, INT64_MAX});
  read_excluded(reader, input);
  return input;
}

}  // namespace hoploom::test
