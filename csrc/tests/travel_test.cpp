// select, narrow, widen, is_counting and stitch.
#include "../travel.h"

#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

TEST(ids_are_selected_by_place) {
  const std::vector<int64_t> ids = {INT64_MIN, 11, INT64_MAX, 13}, places = {2, 0, 2};
  CHECK_EQUAL(values_of<int64_t>(select(ids.data(), 4, places.data(), 3)),
              (std::vector<int64_t>{INT64_MAX, INT64_MIN, INT64_MAX}));
  CHECK_EQUAL(values_of<int64_t>(select(ids.data(), 4, nullptr, 4)), ids);
  for (int64_t bad : {int64_t(-1), int64_t(4), INT64_MAX, INT64_MIN}) {
    CHECK_THROWS(select(ids.data(), 4, &bad, 1));
    CHECK_THROWS(narrow(ids.data(), 4, &bad, 1, 11));
  }
}

TEST(ids_of_any_part_are_narrowed_and_widened_again) {
  constexpr int64_t kSpan = int64_t(1) << 31;
  for (int64_t first : {int64_t(0), int64_t(1), kSpan - 1, kSpan, int64_t(1) << 47}) {
    const std::vector<int64_t> ids = {first, first + kSpan - 1, first + 7, -1}, places = {1, 0, 2};
    const Buffer narrowed = narrow(ids.data(), 4, places.data(), 3, first);
    CHECK_EQUAL(values_of<int32_t>(narrowed), (std::vector<int32_t>{INT32_MAX, 0, 7}));
    CHECK_EQUAL(values_of<int64_t>(widen({narrowed.as<int32_t>(), true, 3, first})),
                (std::vector<int64_t>{ids[1], ids[0], ids[2]}));
    CHECK_EQUAL(values_of<int32_t>(narrow(ids.data(), 4, nullptr, 3, first)), (std::vector<int32_t>{0, INT32_MAX, 7}));
    CHECK_EQUAL(values_of<int64_t>(widen({ids.data(), false, 4, first})), ids);
    for (int64_t bad : {first - 1, first + kSpan, INT64_MIN, INT64_MAX})
      CHECK_THROWS(narrow(&bad, 1, nullptr, 1, first));
  }
}

TEST(ids_that_a_part_does_not_own_are_told) {
  for (int64_t first : {int64_t(0), int64_t(1) << 31, int64_t(1) << 47}) {
    const std::vector<int64_t> ids = {first, first + 9, first + 4};
    const std::vector<int32_t> narrowed = {0, 9, 4};
    CHECK_EQUAL(values_of<int64_t>(owned({ids.data(), false, 3, first}, 10)), ids);
    CHECK_EQUAL(values_of<int64_t>(owned({narrowed.data(), true, 3, first}, 10)), ids);
    CHECK_THROWS(owned({ids.data(), false, 3, first}, 9));
    CHECK_THROWS(owned({narrowed.data(), true, 3, first}, 9));
    for (int64_t bad : {first - 1, first + 10, INT64_MIN, INT64_MAX}) CHECK_THROWS(owned({&bad, false, 1, first}, 10));
    for (int32_t bad : {-1, 10, INT32_MIN, INT32_MAX}) CHECK_THROWS(owned({&bad, true, 1, first}, 10));
  }
}

TEST(places_count_or_do_not) {
  const std::vector<int64_t> sound = counting(100);
  CHECK(is_counting(sound.data(), 100));
  CHECK(is_counting(nullptr, 0));
  for (size_t at : {size_t(0), size_t(50), size_t(99)}) {
    std::vector<int64_t> other = sound;
    other[at] ^= 64;
    CHECK(!is_counting(other.data(), 100));
  }
}

// Node i of nine has i picks: sources i, edges 10 i and so on. Two parts have the odd and the even ones.
TEST(picks_of_parts_are_put_together_in_the_frontiers_order) {
  std::vector<int64_t> places[2], counts[2], sources[2], edges[2], all_sources, all_edges, all_counts;
  for (int64_t node = 8; node >= 0; --node)  // in any order
    for (int64_t k = (places[node % 2].push_back(node), counts[node % 2].push_back(node), 0); k < node; ++k) {
      sources[node % 2].push_back(node);
      edges[node % 2].push_back(10 * node + k);
    }
  for (int64_t node = 0; node < 9; ++node) {
    all_counts.push_back(node);
    for (int64_t k = 0; k < node; ++k) all_sources.push_back(node), all_edges.push_back(10 * node + k);
  }
  all_counts.push_back(0);
  const auto part = [&](size_t p) {
    return PartPicks{places[p].data(),  counts[p].data(), int64_t(places[p].size()),
                     sources[p].data(), edges[p].data(),  int64_t(sources[p].size())};
  };
  const Stitched out = stitch({part(1), part(0)}, 10);
  CHECK_EQUAL(values_of<int64_t>(out.counts), all_counts);
  CHECK_EQUAL(values_of<int64_t>(out.sources), all_sources);
  CHECK_EQUAL(values_of<int64_t>(out.edges), all_edges);
  CHECK_THROWS(stitch({part(1), part(1)}, 10));  // one place twice
  CHECK_THROWS(stitch({part(1), part(0)}, 8));   // a place beyond the frontier
}

TEST(picks_that_do_not_fit_their_counts_are_refused) {
  const std::vector<int64_t> picks = {1, 2, 3}, places = {0, 1};
  const auto stitched = [&](std::vector<int64_t> counts, int64_t num_picks) {
    stitch({{places.data(), counts.data(), 2, picks.data(), picks.data(), num_picks}}, 2);
  };
  stitched({1, 2}, 3);
  CHECK_THROWS(stitched({1, 1}, 3));
  CHECK_THROWS(stitched({1, 3}, 3));
  CHECK_THROWS(stitched({-1, 4}, 3));
  CHECK_THROWS(stitched({INT64_MAX, 1}, 3));
  CHECK_THROWS(stitched({INT64_MIN, 3}, 3));
  for (int64_t bad : {int64_t(-1), int64_t(2), INT64_MAX, INT64_MIN}) {
    const std::vector<int64_t> damaged = {0, bad}, counts = {1, 2};
    CHECK_THROWS(stitch({{damaged.data(), counts.data(), 2, picks.data(), picks.data(), 3}}, 2));
  }
}
