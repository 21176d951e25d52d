// Feeds the core calls that may be damaged. It must throw, or answer as the reference does; where
// the reference says nothing (lists out of time order), the answer must still be consistent.
#include <algorithm>
#include <optional>
#include <set>

#include "../csc.h"
#include "../gather.h"
#include "../relabel.h"
#include "../travel.h"
#include "check.h"
#include "fuzz_input.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

// The answer, or nothing if it threw.
template <typename Call>
auto tried(Call call) -> std::optional<decltype(call())> {
  try {
    return call();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

bool is_id(int64_t id, int64_t limit) { return id >= 0 && id < limit; }

int64_t time_at(const Input& input, int64_t position) {
  if (!input.edge_time.empty()) return input.edge_time[size_t(position)];
  return input.source_time[size_t(source_at(input.adjacency(), position))];
}

bool is_timed(const Input& input) {
  return input.with_frontier_times && !(input.edge_time.empty() && input.source_time.empty());
}

// Whether the reference knows the answer: every list is in time order, and its times can be read.
bool lists_are_in_time_order(const Input& input) {
  if (!is_timed(input)) return true;
  const Adjacency adjacency = input.adjacency();
  for (int64_t node : input.nodes) {
    const auto list = tried([&] { return extent(adjacency, node); });
    if (!list) continue;
    for (int64_t p = list->begin; p < list->begin + list->degree; ++p) {
      if (input.edge_time.empty() && !is_id(source_at(adjacency, p), int64_t(input.source_time.size()))) return false;
      if (p > list->begin && time_at(input, p) < time_at(input, p - 1)) return false;
    }
  }
  return true;
}

void check_node(const Input& input, size_t i, const int64_t* sources, const int64_t* edges, int64_t count,
                bool in_order) {
  const Adjacency adjacency = input.adjacency();
  const Extent list = extent(adjacency, input.nodes[i]);
  const Rule& rule = input.rule;
  const bool takes_last = rule.last && input.with_frontier_times && rule.fanout >= 0;
  std::set<int64_t> distinct;
  CHECK(count >= 0 && (rule.fanout < 0 || count <= rule.fanout));
  if (rule.fanout < 0 || !rule.replace || rule.labor)
    CHECK(count <= list.degree || !input.weight.empty() || rule.replace);
  for (int64_t k = 0; k < count; ++k) {
    const int64_t position = edges[k] - input.graph.first_edge;
    CHECK_BETWEEN(list.begin, position, list.begin + list.degree - 1);
    CHECK_EQUAL(sources[k], source_at(adjacency, position));
    if (!input.weight.empty() && !takes_last) CHECK(input.weight[size_t(position)] > 0);
    if (is_timed(input) && in_order) CHECK(time_at(input, position) <= input.times[i]);
    CHECK(!std::binary_search(rule.excluded, rule.excluded + rule.num_excluded, edges[k]));
    CHECK(distinct.insert(position).second || (rule.replace && rule.fanout >= 0 && !takes_last));
  }
}

void check_consistent(const Input& input, const PickLists& picks, bool in_order) {
  CHECK_EQUAL(picks.counts.size(), input.nodes.size());
  CHECK_EQUAL(picks.sources.size(), picks.edges.size());
  int64_t at = 0;
  for (size_t i = 0; i < picks.counts.size(); ++i) {
    CHECK_BETWEEN(int64_t(0), picks.counts[i], int64_t(picks.sources.size()) - at);
    check_node(input, i, picks.sources.data() + at, picks.edges.data() + at, picks.counts[i], in_order);
    at += picks.counts[i];
  }
  CHECK_EQUAL(at, int64_t(picks.sources.size()));
}

std::optional<PickLists> check_sample(const Input& input) {
  const auto picks =
      tried([&] { return lists_of(sample(input.adjacency(), input.columns(), input.frontier(), input.rule)); });
  const bool in_order = lists_are_in_time_order(input);
  if (in_order) {
    const auto wanted =
        tried([&] { return naive_sample(input.adjacency(), input.columns(), input.frontier(), input.rule); });
    CHECK_EQUAL(picks.has_value(), wanted.has_value());
    if (picks) CHECK_EQUAL(*picks, *wanted);
  }
  if (picks) check_consistent(input, *picks, in_order);
  return picks;
}

void check_one_map(const Input& input, const PickLists& picks, NodeMap& map, bool all_known) {
  NaiveMap naive;
  const auto seeds = scattered(5, input.num_sources, input.salt + 6);
  const auto seed_trees = input.trees.empty() ? input.trees : scattered(5, 3, input.salt + 7);
  const int64_t* trees = input.trees.empty() ? nullptr : input.trees.data();
  map.add_seeds(seeds.data(), trees ? seed_trees.data() : nullptr, 5);
  naive.add_seeds(seeds, seed_trees);
  const auto local = tried([&] {
    return values_of<int32_t>(map.add(picks.sources.data(), int64_t(picks.sources.size()), picks.counts.data(), trees));
  });
  CHECK_EQUAL(local.has_value(), all_known);
  if (!local) return map.clear();
  CHECK_EQUAL(*local, naive.add(picks.sources, picks.counts, input.trees));
  if (trees) CHECK_EQUAL(values_of<int64_t>(map.copy_trees(0)), naive.trees);
  CHECK_EQUAL(values_of<int64_t>(map.take()), naive.nodes);
}

void check_maps(const Input& input, const PickLists& picks) {
  bool all_known = true;
  for (int64_t source : picks.sources) all_known &= is_id(source, input.num_sources);
  PickLists known = picks;
  for (int64_t& source : known.sources)
    if (!is_id(source, input.num_sources)) source = 0;
  for (int64_t budget : {0, 1000}) {
    NodeMap map(input.num_sources, budget);
    check_one_map(input, picks, map, all_known);
    const auto everyone = counting(input.num_sources);
    const Buffer found = map.find(everyone.data(), input.num_sources);
    CHECK_EQUAL(values_of<int32_t>(found), std::vector<int32_t>(everyone.size(), -1));
    check_one_map(input, known, map, true);
  }
}

void check_rows(const Input& input, const PickLists& picks, int64_t row_bytes) {
  std::vector<uint8_t> table;
  for (int64_t value : scattered(input.num_sources * row_bytes, 256, input.salt + 8)) table.push_back(uint8_t(value));
  const auto num_rows = int64_t(picks.sources.size());
  std::vector<uint8_t> rows(size_t(num_rows * row_bytes)), back(table.size());
  bool all_known = true;
  for (int64_t source : picks.sources) all_known &= is_id(source, input.num_sources);
  const auto gathered = tried([&] {
    gather(table.data(), input.num_sources, row_bytes, picks.sources.data(), num_rows, 0, rows.data());
    return true;
  });
  CHECK_EQUAL(gathered.has_value(), all_known);
  const auto scattered_back = tried([&] {
    scatter(rows.data(), row_bytes, picks.sources.data(), num_rows, input.num_sources, back.data());
    return true;
  });
  CHECK_EQUAL(scattered_back.has_value(), all_known);
  if (!all_known) return;
  for (int64_t i = 0; i < num_rows * row_bytes; ++i) {
    const size_t cell = size_t(picks.sources[size_t(i / row_bytes)] * row_bytes + i % row_bytes);
    CHECK_EQUAL(int(rows[size_t(i)]), int(table[cell]));
    CHECK_EQUAL(int(back[cell]), int(table[cell]));
  }
}

struct Counts {
  std::vector<int64_t> counts;
  bool must_throw = false;
};

// The counts of the picks; perhaps one is damaged.
Counts counts_from(const PickLists& picks, ByteReader& reader) {
  Counts made{picks.counts};
  if (made.counts.empty() || reader.below(6) > 1) return made;
  int64_t& damaged = made.counts[reader.raw() % made.counts.size()];
  const int64_t other = damaged_id(reader);
  damaged = other == damaged ? other / 2 - 1 : other;
  made.must_throw = true;
  return made;
}

// The even nodes of the frontier are one part's, the odd ones another's.
void check_stitching(const PickLists& picks, const Counts& given) {
  std::vector<int64_t> places[2], counts[2], sources[2], edges[2];
  for (size_t i = 0, at = 0; i < picks.counts.size(); ++i) {
    places[i % 2].push_back(int64_t(i));
    counts[i % 2].push_back(given.counts[i]);
    for (int64_t k = 0; k < picks.counts[i]; ++k, ++at) {
      sources[i % 2].push_back(picks.sources[at]);
      edges[i % 2].push_back(picks.edges[at]);
    }
  }
  std::vector<PartPicks> parts;
  for (size_t p : {1u, 0u})
    parts.push_back({places[p].data(), counts[p].data(), int64_t(places[p].size()), sources[p].data(), edges[p].data(),
                     int64_t(sources[p].size())});
  const auto stitched = tried([&] { return stitch(parts, int64_t(picks.counts.size())); });
  CHECK_EQUAL(stitched.has_value(), !given.must_throw);
  if (!stitched) return;
  CHECK_EQUAL(values_of<int64_t>(stitched->counts), picks.counts);
  CHECK_EQUAL(values_of<int64_t>(stitched->sources), picks.sources);
  CHECK_EQUAL(values_of<int64_t>(stitched->edges), picks.edges);
}

void check_edge_rows(const PickLists& picks, const std::vector<int64_t>& counts) {
  const std::vector<int32_t> local(picks.sources.begin(), picks.sources.end());
  std::vector<int64_t> sources(local.size()), destinations(local.size());
  const auto filled = tried([&] {
    edge_rows(local.data(), int64_t(local.size()), counts.data(), int64_t(counts.size()), 7, sources.data(),
              destinations.data());
    return true;
  });
  CHECK_EQUAL(filled.has_value(), counts == picks.counts);
  if (!filled) return;
  CHECK_EQUAL(sources, std::vector<int64_t>(local.begin(), local.end()));
  for (size_t i = 0, at = 0; i < counts.size(); ++i)
    for (int64_t k = 0; k < counts[i]; ++k, ++at) CHECK_EQUAL(destinations[at], 7 + int64_t(i));
}

// The edge list source -> place in its list: any order of destinations, sources perhaps out of range.
void check_csc(const Input& input, int threads) {
  const auto& sources = input.graph.sources;
  const auto num_edges = int64_t(sources.size());
  if (num_edges > 5000) return;
  const int64_t num_destinations = 1 + int64_t(input.salt % 30);
  const auto destinations = scattered(num_edges, num_destinations, input.salt + 9);
  const int64_t num_sources = input.wide_ids ? INT64_MAX : input.num_sources;
  bool all_known = true;
  for (int64_t source : sources) all_known &= is_id(source, num_sources);
  auto csc = tried([&] {
    return build_csc(sources.data(), destinations.data(), num_edges, num_sources, num_destinations,
                     {threads, 1 + int64_t(input.salt % 64)});
  });
  CHECK_EQUAL(csc.has_value(), all_known);
  if (!csc) return;
  CHECK_EQUAL(csc->wide_ids, input.wide_ids);
  if (!input.edge_time.empty()) order_by_time(*csc, num_edges, num_destinations, input.edge_time.data(), nullptr);
  const auto wanted = naive_csc(sources, destinations, input.edge_time);
  for (size_t p = 0; p < wanted.size(); ++p) {
    const int64_t d = wanted[p].destination;
    CHECK_BETWEEN(csc->indptr.as<int64_t>()[d], int64_t(p), csc->indptr.as<int64_t>()[d + 1] - 1);
    CHECK_EQUAL(csc->wide_ids ? csc->indices.as<int64_t>()[p] : csc->indices.as<int32_t>()[p], wanted[p].source);
    CHECK_EQUAL(csc->is_identity ? int64_t(p) : csc->permutation.as<int64_t>()[p], wanted[p].position);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  ByteReader reader(bytes, size);
  if (reader.one_in(4)) return check_aggregation(reader), 0;
  const Input input = read_input(reader);
  if (const auto picks = check_sample(input)) {
    check_maps(input, *picks);
    check_rows(input, *picks, reader.any_of<int64_t>({0, 1, 2, 3, 4, 8, 16, 17}));
    const Counts given = counts_from(*picks, reader);
    check_stitching(*picks, given);
    check_edge_rows(*picks, given.counts);
  }
  check_csc(input, reader.one_in(32) ? 3 : 1);
  return 0;
}
