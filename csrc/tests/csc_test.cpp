// build_csc and order_by_time against a stable sort.
#include "../csc.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "../random.h"
#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

struct Coo {
  std::vector<int64_t> sources, destinations;
  int64_t num_sources, num_destinations;
  int64_t num_edges() const { return int64_t(sources.size()); }
};

Coo random_coo(int64_t num_edges, int64_t num_sources, int64_t num_destinations) {
  return {scattered(num_edges, num_sources, 3), scattered(num_edges, num_destinations, 4), num_sources,
          num_destinations};
}

Csc build(const Coo& coo, Split split) {
  return build_csc(coo.sources.data(), coo.destinations.data(), coo.num_edges(), coo.num_sources, coo.num_destinations,
                   split);
}

std::string refusal(const Coo& coo) {
  try {
    build(coo, {2, 64});
  } catch (const std::out_of_range& error) {
    return error.what();
  }
  return "";
}

void check_csc(const Csc& csc, const Coo& coo, const std::vector<Edge>& wanted) {
  std::vector<int64_t> indptr(size_t(coo.num_destinations) + 1), indices, permutation;
  for (const Edge& edge : wanted) {
    indices.push_back(edge.source);
    permutation.push_back(edge.position);
    ++indptr[size_t(edge.destination) + 1];
  }
  std::partial_sum(indptr.begin(), indptr.end(), indptr.begin());
  CHECK_EQUAL(values_of<int64_t>(csc.indptr), indptr);
  if (csc.wide_ids) {
    CHECK_EQUAL(values_of<int64_t>(csc.indices), indices);
  } else {
    CHECK_EQUAL(values_of<int32_t>(csc.indices), std::vector<int32_t>(indices.begin(), indices.end()));
  }
  CHECK_EQUAL(csc.is_identity, std::is_sorted(permutation.begin(), permutation.end()));
  CHECK_EQUAL(values_of<int64_t>(csc.permutation), csc.is_identity ? std::vector<int64_t>() : permutation);
}

// Every division of the work, from one bucket to one per destination.
void check_divided(const Coo& coo) {
  const auto wanted = naive_csc(coo.sources, coo.destinations);
  for (int threads : {1, 2, 3, 8})
    for (int64_t bucket_size : {1, 7, 100, 1 << 15}) check_csc(build(coo, {threads, bucket_size}), coo, wanted);
}

}  // namespace

TEST(csc_equals_a_stable_sort_for_every_division_into_buckets) {
  for (int64_t num_destinations : {1, 2, 15, 16, 17, 900})
    for (int64_t num_edges : {0, 1, 7, 8, 9, 15, 16, 17, 1000})
      check_divided(random_coo(num_edges, 60, num_destinations));
  check_divided(random_coo(3000, 60, 10'000));  // more destinations than buckets may be
}

TEST(wide_ids_equal_a_stable_sort_for_every_division_into_buckets) {
  for (int64_t num_destinations : {1, 17, 900})
    for (int64_t num_edges : {1, 7, 8, 9, 3000})
      check_divided(random_coo(num_edges, int64_t(INT32_MAX) + 2, num_destinations));
}

TEST(a_destination_with_nearly_all_edges_keeps_their_order) {
  for (int64_t hub : {0, 450, 899}) {
    Coo coo = random_coo(3000, 60, 900);
    for (size_t e = 0; e < 3000; ++e)
      if (e % 100) coo.destinations[e] = hub;
    check_divided(coo);
  }
}

TEST(edges_nearly_in_order_equal_a_stable_sort) {
  Coo coo = random_coo(3000, 60, 900);
  std::sort(coo.destinations.begin(), coo.destinations.end());
  check_divided(coo);
  for (size_t at : {size_t(0), size_t(1499), size_t(2998)}) {  // where the shares of two threads meet, too
    Coo swapped = coo;
    std::swap(swapped.destinations[at], swapped.destinations[at + 1]);
    check_divided(swapped);
  }
  std::reverse(coo.destinations.begin(), coo.destinations.end());
  check_divided(coo);
}

TEST(csc_equals_a_stable_sort_for_every_number_of_threads) {
  for (int64_t num_destinations : {1, 2, 3, 7, 8, 9, 100})
    for (int64_t num_edges : {0, 1, 2, 50, 1000}) {
      const Coo coo = random_coo(num_edges, 60, num_destinations);
      const auto wanted = naive_csc(coo.sources, coo.destinations);
      for (int threads = 1; threads <= 8; ++threads) check_csc(build(coo, threads), coo, wanted);
    }
}

TEST(a_number_of_threads_out_of_reason_is_clamped) {
  const Coo coo = random_coo(500, 60, 90);
  for (int threads : {0, -5, 1000}) check_csc(build(coo, threads), coo, naive_csc(coo.sources, coo.destinations));
}

TEST(sources_beyond_32_bits_are_kept) {
  Coo coo = random_coo(300, int64_t(1) << 50, 20);
  CHECK(build(coo, 3).wide_ids);
  check_csc(build(coo, 3), coo, naive_csc(coo.sources, coo.destinations));
  coo = random_coo(300, INT32_MAX, 20);
  CHECK(!build(coo, 3).wide_ids);
  check_csc(build(coo, 3), coo, naive_csc(coo.sources, coo.destinations));
}

TEST(edges_in_order_of_destination_need_no_permutation) {
  Coo coo = random_coo(500, 60, 40);
  std::sort(coo.destinations.begin(), coo.destinations.end());
  for (int threads = 1; threads <= 4; ++threads) {
    const Csc csc = build(coo, threads);
    CHECK(csc.is_identity);
    CHECK_EQUAL(csc.permutation.size(), size_t(0));
    check_csc(csc, coo, naive_csc(coo.sources, coo.destinations));
  }
  std::swap(coo.destinations.front(), coo.destinations.back());
  CHECK(!build(coo, 2).is_identity);
}

TEST(an_edge_out_of_range_throws) {
  for (int64_t bad : {int64_t(-1), int64_t(60), INT64_MAX, INT64_MIN})
    for (size_t at : {size_t(0), size_t(99)}) {
      Coo coo = random_coo(100, 60, 60);
      coo.sources[at] = bad;
      CHECK_THROWS(build(coo, 3));
      coo = random_coo(100, 60, 60);
      coo.destinations[at] = bad;
      CHECK_THROWS(build(coo, 3));
    }
  Coo empty{{0}, {0}, 1, 0};
  CHECK_THROWS(build(empty, 1));
}

TEST(an_edge_out_of_range_is_named_with_its_side_sources_first) {
  Coo coo = random_coo(3000, 60, 900);
  coo.destinations[2999] = 900;
  CHECK_EQUAL(refusal(coo), std::string("destination id 900 of edge 2999 is out of range [0, 900)"));
  coo.sources[2000] = -7;
  coo.sources[2001] = 60;
  CHECK_EQUAL(refusal(coo), std::string("source id -7 of edge 2000 is out of range [0, 60)"));
  std::sort(coo.destinations.begin(), coo.destinations.end() - 1);
  coo.destinations[2999] = 899;
  CHECK_EQUAL(refusal(coo), std::string("source id -7 of edge 2000 is out of range [0, 60)"));
}

TEST(a_number_of_destinations_out_of_reason_throws) {
  for (int64_t num_destinations : {int64_t(-1), INT64_MIN, int64_t(1) << 61, INT64_MAX})
    CHECK_THROWS(build(Coo{{0, 0}, {1, 0}, 1, num_destinations}, 1));
}

TEST(a_graph_without_nodes_or_edges_is_built) {
  const Coo coo{{}, {}, 0, 0};
  for (int threads : {1, 4}) check_csc(build(coo, threads), coo, {});
}

TEST(lists_by_edge_time_equal_a_stable_sort) {
  for (int64_t num_times : {1, 3, 1000}) {
    const Coo coo = random_coo(600, 60, 13);
    const auto edge_time = scattered(600, num_times, 8);
    Csc csc = build(coo, 3);
    order_by_time(csc, 600, 13, edge_time.data(), nullptr);
    check_csc(csc, coo, naive_csc(coo.sources, coo.destinations, edge_time));
  }
}

TEST(lists_by_source_time_equal_a_stable_sort) {
  for (int64_t num_sources : {int64_t(60), int64_t(7)}) {
    const Coo coo = random_coo(600, num_sources, 13);
    const auto source_time = scattered(num_sources, 20, 8);
    std::vector<int64_t> edge_time;
    for (int64_t source : coo.sources) edge_time.push_back(source_time[size_t(source)]);
    Csc csc = build(coo, 2);
    order_by_time(csc, 600, 13, nullptr, source_time.data());
    check_csc(csc, coo, naive_csc(coo.sources, coo.destinations, edge_time));
  }
}

TEST(wide_lists_by_edge_time_equal_a_stable_sort) {
  const Coo coo = random_coo(300, int64_t(1) << 40, 13);
  const auto edge_time = scattered(300, 20, 8);
  Csc csc = build(coo, 2);
  order_by_time(csc, 300, 13, edge_time.data(), nullptr);
  check_csc(csc, coo, naive_csc(coo.sources, coo.destinations, edge_time));
}

TEST(ordering_by_time_finds_and_loses_the_identity) {
  Coo coo = random_coo(400, 60, 13);
  std::sort(coo.destinations.begin(), coo.destinations.end());
  const auto rising = counting(400), falling = [] {
    auto times = counting(400);
    std::reverse(times.begin(), times.end());
    return times;
  }();
  Csc csc = build(coo, 2);
  order_by_time(csc, 400, 13, rising.data(), nullptr);
  CHECK(csc.is_identity);
  check_csc(csc, coo, naive_csc(coo.sources, coo.destinations, rising));
  order_by_time(csc, 400, 13, falling.data(), nullptr);
  CHECK(!csc.is_identity);
  check_csc(csc, coo, naive_csc(coo.sources, coo.destinations, falling));
}

// Another thread writes to the edges meanwhile, which is a race by itself; here the writes are atomic. Each result is
// one of a graph with all its edges, or an error.
TEST(edges_that_change_while_they_are_read_lead_nowhere) {
  for (bool is_sorted : {false, true}) {
    Coo coo = random_coo(40000, 300, 500);
    if (is_sorted) std::sort(coo.destinations.begin(), coo.destinations.end());
    std::atomic<bool> is_done = false;
    std::thread writer([&] {
      const std::vector<int64_t> before = coo.destinations, values = {499, 0, int64_t(1) << 40, -1, 250};
      for (size_t i = 0; !is_done; ++i) {
        const size_t edge = size_t(mix(7, i) % before.size());
        __atomic_store_n(&coo.destinations[edge], values[i % values.size()], __ATOMIC_RELAXED);
        __atomic_store_n(&coo.destinations[edge], before[edge], __ATOMIC_RELAXED);
      }
    });
    for (int round = 0; round < 60; ++round) {
      std::string error = thrown_by([&] {
        const Csc csc = build(coo, {2, 64});
        const auto indptr = values_of<int64_t>(csc.indptr);
        CHECK(std::is_sorted(indptr.begin(), indptr.end()) && indptr.front() == 0 && indptr.back() == 40000);
        if (!csc.is_identity) {
          auto edges = values_of<int64_t>(csc.permutation);
          std::sort(edges.begin(), edges.end());
          CHECK_EQUAL(edges, counting(40000));
        }
      });
      CHECK(error.empty() || error.find("changed while") != std::string::npos ||
            error.find("out of range") != std::string::npos);
    }
    is_done = true;
    writer.join();
    CHECK_EQUAL(thrown_by([&] { build(coo, {2, 64}); }), std::string());
  }
}

// The first edge has none before it that it could be smaller than.
TEST(a_first_edge_that_becomes_negative_is_not_left_out) {
  Coo coo = random_coo(2000, 300, 500);
  std::sort(coo.destinations.begin(), coo.destinations.end());
  coo.destinations[0] = 0;
  std::atomic<bool> is_done = false;
  std::thread writer([&] {
    for (int64_t i = 0; !is_done; ++i) __atomic_store_n(&coo.destinations[0], -(i / 64 % 2), __ATOMIC_RELAXED);
  });
  for (int round = 0; round < 3000; ++round) {
    int64_t first = 0;
    thrown_by([&] { first = values_of<int64_t>(build(coo, {1, 64}).indptr).front(); });
    CHECK_EQUAL(first, int64_t(0));
  }
  is_done = true;
  writer.join();
}
