// The buffer pool, and several threads that share it.
#include "../buffers.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "../gather.h"
#include "../relabel.h"
#include "check.h"
#include "graphs.h"
#include "reference.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {
constexpr size_t kMega = size_t(1) << 20;
}

TEST(a_buffer_has_room_for_its_size_and_wastes_at_most_a_quarter) {
  for (size_t size : {0u, 1u, 8u, 255u, 256u, 257u, 320u, 321u, 1000u, 4096u, 4097u, 100000u, 2097151u, 2097152u,
                      2097153u, 5000000u}) {
    const Buffer buffer(size);
    CHECK_EQUAL(buffer.size(), size);
    CHECK_BETWEEN(size, buffer.capacity(), std::max<size_t>(256, size + size / 4));
    CHECK_EQUAL(buffer.as<char>() == nullptr, false);
    CHECK_EQUAL(reinterpret_cast<uintptr_t>(buffer.as<char>()) % 64, uintptr_t(0));
    std::memset(buffer.as<char>(), 1, buffer.capacity());
  }
}

TEST(a_dropped_buffer_is_used_again) {
  for (size_t size : {1000 * size_t(1), 3 * kMega}) {
    pool_trim();
    void* bytes = Buffer(size).as<void>();
    CHECK_EQUAL(pool_use().idle_bytes, Buffer(size).capacity());
    const Buffer again(size), other(size);
    CHECK_EQUAL(again.as<void>(), bytes);
    CHECK(other.as<void>() != bytes);
    CHECK_EQUAL(pool_use().idle_bytes, size_t(0));
  }
}

TEST(the_pool_knows_what_is_live_and_idle) {
  pool_trim();
  const size_t live = pool_use().live_bytes;
  {
    const Buffer small(1000), large(5 * kMega);
    CHECK_EQUAL(pool_use().live_bytes, live + small.capacity() + large.capacity());
    CHECK_EQUAL(pool_use().idle_bytes, size_t(0));
  }
  CHECK_EQUAL(pool_use().live_bytes, live);
  CHECK_EQUAL(pool_use().idle_bytes, Buffer(1000).capacity() + Buffer(5 * kMega).capacity());
  pool_trim();
  CHECK_EQUAL(pool_use().idle_bytes, size_t(0));
  CHECK_EQUAL(pool_use().live_bytes, live);
}

TEST(a_live_buffer_outlasts_pool_trim) {
  const Buffer kept(3 * kMega);
  std::memset(kept.as<char>(), 5, kept.size());
  pool_trim();
  CHECK_EQUAL(int(kept.as<char>()[3 * kMega - 1]), 5);
}

// What was live at once may lie idle at once, and no more; the pages are never touched, so they cost nothing here.
TEST(idle_memory_is_bounded_by_what_was_live_at_once) {
  pool_trim();
  {
    const Buffer one(300 * kMega), other(300 * kMega), third(100 * kMega);
  }
  const size_t idle = pool_use().idle_bytes;
  CHECK_BETWEEN(700 * kMega, idle, 850 * kMega);
  for (size_t size = 10; size < 300; size += 30) Buffer(size * kMega);
  CHECK_BETWEEN(size_t(1), pool_use().idle_bytes, idle);
  {
    const Buffer newest(280 * kMega);
  }
  const size_t before = pool_use().idle_bytes;
  const Buffer again(280 * kMega);
  CHECK(pool_use().idle_bytes < before);  // sizes that came before it made room, so it was kept
  pool_trim();
}

TEST(a_growing_buffer_keeps_what_it_is_told_to) {
  Buffer buffer;
  CHECK_EQUAL(buffer.size(), size_t(0));
  std::vector<int64_t> wanted;
  for (int64_t value = 0; value < 400000; ++value) {
    buffer.grow(wanted.size() * 8 + 8, wanted.size() * 8);
    buffer.as<int64_t>()[value] = value;
    wanted.push_back(value);
    if (value == 100) buffer.trim(8), buffer.grow(wanted.size() * 8, wanted.size() * 8);
  }
  CHECK_EQUAL(values_of<int64_t>(buffer), wanted);
}

TEST(a_moved_buffer_takes_its_bytes_along) {
  Buffer from(100);
  std::memset(from.as<char>(), 9, 100);
  Buffer to(std::move(from));
  CHECK_EQUAL(from.size() + from.capacity(), size_t(0));
  CHECK_EQUAL(int(to.as<char>()[99]), 9);
  Buffer assigned(50);
  assigned = std::move(to);
  CHECK_EQUAL(assigned.size(), size_t(100));
  CHECK_EQUAL(int(assigned.as<char>()[0]), 9);
}

TEST(zeroed_pages_are_zero) {
  for (size_t bytes : {size_t(0), size_t(1), size_t(5000), 3 * kMega}) {
    ZeroedPages pages(bytes), moved(std::move(pages));
    CHECK(pages.as<char>() == nullptr);
    for (size_t i = 0; i < bytes; ++i) CHECK_EQUAL(int(moved.as<char>()[i]), 0);
    if (bytes) moved.as<char>()[bytes - 1] = 1;
  }
}

namespace {

struct Batch {
  std::vector<int64_t> nodes, edges;
  std::vector<uint8_t> rows;
  bool operator==(const Batch&) const = default;
};

// Three hops and a gather: the feature row of node v is v.
Batch make_batch(const Graph& graph, NodeMap& map, uint64_t key, const std::vector<int64_t>& table) {
  Batch batch;
  auto frontier = scattered(20, graph.num_nodes(), key);
  map.add_seeds(frontier.data(), nullptr, int64_t(frontier.size()));
  for (uint32_t hop = 0; hop < 3; ++hop) {
    const int64_t before = map.size();
    const Picks picks = sample(graph.adjacency(), {}, frontier_of(frontier), {key, hop << 16, 5, false, false, false});
    const auto num_picks = int64_t(picks.sources.size() / 8);
    map.add(picks.sources.as<int64_t>(), num_picks, picks.counts.as<int64_t>(), nullptr);
    for (int64_t edge : values_of<int64_t>(picks.edges)) batch.edges.push_back(edge);
    frontier = values_of<int64_t>(map.copy_nodes(before));
  }
  const Buffer nodes = map.take();
  Buffer rows(nodes.size());
  gather(reinterpret_cast<const uint8_t*>(table.data()), graph.num_nodes(), 8, nodes.as<int64_t>(),
         int64_t(nodes.size() / 8), 0, rows.as<uint8_t>());
  CHECK_EQUAL(values_of<int64_t>(rows), values_of<int64_t>(nodes));
  batch.nodes = values_of<int64_t>(nodes);
  batch.rows = values_of<uint8_t>(rows);
  return batch;
}

}  // namespace

TEST(threads_with_maps_of_their_own_make_the_batches_of_one_thread) {
  constexpr uint64_t kThreads = 4, kBatches = 12;
  const Graph graph = graph_of_equal_degrees(2000, 12, 2000);
  const auto table = counting(2000);
  std::vector<Batch> alone(kThreads * kBatches), together(kThreads * kBatches);
  NodeMap map(2000, 1 << 20);
  for (uint64_t step = 0; step < alone.size(); ++step) alone[step] = make_batch(graph, map, step, table);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      NodeMap own(2000, t % 2 ? 1 << 20 : 0);
      for (uint64_t step = t; step < together.size(); step += kThreads)
        together[step] = make_batch(graph, own, step, table);
    });
  for (auto& thread : threads) thread.join();
  for (size_t step = 0; step < alone.size(); ++step) CHECK(together[step] == alone[step]);
}

// Buffers made by one thread are read and dropped by another, while a third trims the pool.
TEST(buffers_may_be_dropped_by_another_thread) {
  const size_t live = pool_use().live_bytes;
  std::vector<Buffer> made(60);
  std::thread maker([&] {
    for (size_t i = 0; i < made.size(); ++i) {
      made[i] = Buffer(100 + i * 50000);
      std::memset(made[i].as<char>(), int(i), made[i].size());
    }
  });
  std::thread trimmer([] {
    for (int i = 0; i < 200; ++i) pool_trim();
  });
  maker.join();
  std::thread dropper([&] {
    for (size_t i = 0; i < made.size(); ++i) {
      CHECK_EQUAL(made[i].as<uint8_t>()[made[i].size() - 1], uint8_t(i));
      made[i] = Buffer();
    }
    made.clear();
  });
  dropper.join();
  trimmer.join();
  CHECK_EQUAL(pool_use().live_bytes, live);
}

TEST(idle_memory_can_be_bounded) {
  pool_trim();
  {
    const Buffer large(64 * kMega), small(kMega);
  }
  CHECK_EQUAL(pool_use().idle_bytes, Buffer(64 * kMega).capacity() + Buffer(kMega).capacity());
  pool_trim();
  pool_keep_at_most(size_t(2 * kMega));
  {
    const Buffer large(64 * kMega), small(kMega);
  }
  CHECK_EQUAL(pool_use().idle_bytes, Buffer(kMega).capacity());
  pool_keep_at_most(SIZE_MAX);
}
