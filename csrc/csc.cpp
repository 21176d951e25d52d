#include "csc.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "csc_partition.h"
#include "threads.h"

namespace hoploom {
namespace {

constexpr int64_t kMostBuckets = 4096;  // their write buffers fit a cache of 1 MiB

using Counts = std::vector<std::vector<int64_t>>;  // [threads][num_buckets]

void check_range(const int64_t* ids, int64_t count, int64_t limit, const char* side) {
  for (int64_t i = 0; i < count; ++i)
    if (const int64_t id = __atomic_load_n(ids + i, __ATOMIC_RELAXED); id < 0 || id >= limit)
      throw std::out_of_range(std::string(side) + " id " + std::to_string(id) + " of edge " + std::to_string(i) +
                              " is out of range [0, " + std::to_string(limit) + ")");
}

[[noreturn]] void refuse(const Coo& coo) {
  check_range(coo.sources, coo.num_edges, coo.num_sources, "source");
  check_range(coo.destinations, coo.num_edges, coo.num_destinations, "destination");
  throw std::runtime_error("edges changed while they were read");
}

Range share(const Coo& coo, int t, int threads) {
  const auto begin = [&](int i) { return coo.num_edges / threads * i + std::min<int64_t>(i, coo.num_edges % threads); };
  return {begin(t), begin(t + 1)};
}

struct Survey {
  bool are_known = true, are_sorted = true;  // of the destinations
};

// Counts the edges of every bucket; out-of-range ones count for the last.
Survey survey(const Coo& coo, const Buckets& buckets, Range edges, std::vector<int64_t>& counts) {
  if (edges.begin == edges.end) return {};
  uint64_t greatest = 0;
  bool are_sorted = true;
  int64_t before = coo.destination(std::max<int64_t>(edges.begin - 1, 0));
  for (int64_t e = edges.begin; e < edges.end; ++e) {
    const int64_t destination = coo.destination(e);
    greatest = std::max(greatest, uint64_t(destination));
    are_sorted &= before <= destination;
    before = destination;
    ++counts[std::min(uint64_t(destination) >> buckets.shift, uint64_t(buckets.count - 1))];
  }
  return {are_below(greatest, coo.num_destinations), are_sorted};
}

Survey survey_all(const Coo& coo, const Buckets& buckets, Counts& counts) {
  const int threads = int(counts.size());
  std::vector<Survey> found(counts.size());
  on_threads(threads,
             [&](int t) { found[size_t(t)] = survey(coo, buckets, share(coo, t, threads), counts[size_t(t)]); });
  Survey all;
  for (const Survey& one : found) {
    all.are_known &= one.are_known;
    all.are_sorted &= one.are_sorted;
  }
  return all;
}

// Replaces each thread's counts by the first position of its edges in each bucket, after those of earlier threads.
// Returns the first position of each bucket, and the end of the last.
std::vector<int64_t> begins_of(Counts& counts, const Buckets& buckets) {
  std::vector<int64_t> begins{0};
  for (int64_t next = 0; begins.size() <= size_t(buckets.count); begins.push_back(next))
    for (auto& of_thread : counts) next += std::exchange(of_thread[begins.size() - 1], next);
  return begins;
}

// Sorts one bucket (stable), and writes the offsets of its lists.
template <typename Id>
void sort_bucket(const Buckets& buckets, Range edges, Entries<Id> entries, Entries<Id> spare,
                 std::vector<int64_t>& cursors, std::span<int64_t> indptr) {
  const size_t num_edges = size_t(edges.end - edges.begin);
  std::fill_n(cursors.begin(), indptr.size(), 0);
  for (size_t i = 0; i < num_edges; ++i) {
    spare.records[i] = entries.records[size_t(edges.begin) + i];
    ++cursors[buckets.place(spare.records[i])];
  }
  if (num_edges) std::memcpy(spare.sources, entries.sources + edges.begin, num_edges * sizeof(Id));
  int64_t next = edges.begin;
  for (size_t d = 0; d < indptr.size(); ++d) {
    indptr[d] = next;
    next += std::exchange(cursors[d], next);
  }
  for (size_t i = 0; i < num_edges; ++i) {
    const int64_t position = cursors[buckets.place(spare.records[i])]++;
    entries.records[position] = buckets.edge(spare.records[i]);
    entries.sources[position] = spare.sources[i];
  }
}

template <typename Id>
void sort_buckets(const Coo& coo, const Buckets& buckets, const std::vector<int64_t>& begins, int threads,
                  const Csc& csc) {
  int64_t most = 0;
  for (size_t b = 0; b + 1 < begins.size(); ++b) most = std::max(most, begins[b + 1] - begins[b]);
  const int64_t width = int64_t(1) << buckets.shift;
  std::vector<Buffer> spare;  // pages that no bucket needs are never touched
  for (int t = 0; t < threads; ++t) spare.emplace_back(size_t(most) * (sizeof(uint64_t) + sizeof(Id)));
  Counts cursors(size_t(threads), std::vector<int64_t>(size_t(std::min(width, coo.num_destinations))));
  std::atomic<int64_t> next = 0;
  on_threads(threads, [&](int thread) {
    const auto t = size_t(thread);
    uint64_t* records = spare[t].as<uint64_t>();
    for (int64_t b; (b = next.fetch_add(1)) < buckets.count;) {
      const int64_t first = b * width, num_lists = std::min(width, coo.num_destinations - first);
      sort_bucket<Id>(buckets, {begins[size_t(b)], begins[size_t(b) + 1]},
                      {csc.permutation.as<uint64_t>(), csc.indices.as<Id>()},
                      {records, reinterpret_cast<Id*>(records + most)}, cursors[t],
                      {csc.indptr.as<int64_t>() + first, size_t(num_lists)});
    }
  });
  csc.indptr.as<int64_t>()[coo.num_destinations] = coo.num_edges;
}

// Returns false if a source is out of range, or the edges have changed.
template <typename Id>
bool sort_edges(const Coo& coo, const Buckets& buckets, Counts& counts, const Csc& csc) {
  const int threads = int(counts.size());
  const auto begins = begins_of(counts, buckets);
  std::atomic<bool> are_known = true;
  {
    std::vector<Partition<Id>> partitions;
    for (size_t t = 0; t < counts.size(); ++t)  // a thread's range ends where the next thread's begins
      partitions.emplace_back(Entries<Id>{csc.permutation.as<uint64_t>(), csc.indices.as<Id>()}, counts[t],
                              t + 1 < counts.size() ? counts[t + 1] : std::vector(begins.begin() + 1, begins.end()));
    on_threads(threads, [&](int t) {
      if (!partitions[size_t(t)].run(coo, buckets, share(coo, t, threads))) are_known = false;
    });
  }
  if (are_known) sort_buckets<Id>(coo, buckets, begins, threads, csc);
  return are_known;
}

// For edges that are already sorted: a list begins where the destination changes. Returns false like sort_edges().
template <typename Id>
bool copy_edges(const Coo& coo, int threads, const Csc& csc) {
  std::atomic<bool> are_known = true;
  int64_t* indptr = csc.indptr.as<int64_t>();
  std::vector<int64_t> last = {-1};  // [threads + 1] the destination before each thread's first edge
  for (int t = 0; t < threads; ++t) {
    const Range edges = share(coo, t, threads);
    last.push_back(edges.begin < edges.end ? coo.destination(edges.end - 1) : last.back());
    if (last.back() < last[size_t(t)] || last.back() >= coo.num_destinations) return false;
  }
  on_threads(threads, [&](int t) {
    const Range edges = share(coo, t, threads);
    uint64_t greatest = 0;
    int64_t before = last[size_t(t)];
    for (int64_t e = edges.begin; e < edges.end; ++e) {
      const int64_t source = coo.source(e), destination = coo.destination(e);
      greatest = std::max(greatest, uint64_t(source));
      csc.indices.as<Id>()[e] = Id(source);
      if (destination < 0 || destination < before || destination > last[size_t(t) + 1]) {
        are_known = false;
        return;
      }
      while (before < destination) indptr[++before] = e;
    }
    if (before != last[size_t(t) + 1]) are_known = false;
    if (edges.begin < edges.end && !are_below(greatest, coo.num_sources)) are_known = false;
  });
  if (!are_known) return false;
  std::fill(indptr + last.back() + 1, indptr + coo.num_destinations + 1, coo.num_edges);
  return true;
}

template <typename Id>
bool fill(const Coo& coo, const Buckets& buckets, Counts& counts, const Csc& csc) {
  return csc.is_identity ? copy_edges<Id>(coo, int(counts.size()), csc) : sort_edges<Id>(coo, buckets, counts, csc);
}

}  // namespace

Csc build_csc(const int64_t* sources, const int64_t* destinations, int64_t num_edges, int64_t num_sources,
              int64_t num_destinations, Split split) {
  if (num_destinations < 0 || num_destinations > INT64_MAX / 16) throw std::bad_alloc();
  const Coo coo{sources, destinations, num_edges, num_sources, num_destinations};
  const int64_t wanted = num_edges / split.bucket_size + num_destinations / split.bucket_size;
  const Buckets buckets(num_edges, num_destinations, std::clamp<int64_t>(wanted, 1, kMostBuckets));
  Counts counts(size_t(std::clamp(split.threads, 1, 64)), std::vector<int64_t>(size_t(buckets.count)));
  const Survey found = survey_all(coo, buckets, counts);
  if (!found.are_known) refuse(coo);
  Csc csc;
  csc.wide_ids = num_sources > INT32_MAX;
  csc.is_identity = found.are_sorted;
  csc.indptr = Buffer(size_t(num_destinations + 1) * 8);
  csc.indices = Buffer(size_t(num_edges) * (csc.wide_ids ? 8 : 4));
  if (!csc.is_identity) csc.permutation = Buffer(size_t(num_edges) * 8);
  if (!(csc.wide_ids ? fill<int64_t> : fill<int32_t>)(coo, buckets, counts, csc)) refuse(coo);
  return csc;
}

namespace {
struct Timed {
  int64_t time, source, edge;
};

template <typename Id>
void order_lists(Csc& csc, int64_t num_destinations, const int64_t* edge_time, const int64_t* source_time) {
  const int64_t* indptr = csc.indptr.as<int64_t>();
  Id* indices = csc.indices.as<Id>();
  int64_t* permutation = csc.permutation.as<int64_t>();
  std::vector<Timed> list;
  for (int64_t d = 0; d < num_destinations; ++d) {
    list.clear();
    for (int64_t p = indptr[d]; p < indptr[d + 1]; ++p)
      list.push_back(
          {edge_time ? edge_time[permutation[p]] : source_time[indices[p]], int64_t(indices[p]), permutation[p]});
    std::stable_sort(list.begin(), list.end(), [](const Timed& a, const Timed& b) { return a.time < b.time; });
    for (int64_t p = indptr[d]; p < indptr[d + 1]; ++p) {
      indices[p] = Id(list[size_t(p - indptr[d])].source);
      permutation[p] = list[size_t(p - indptr[d])].edge;
    }
  }
}
}  // namespace

void order_by_time(Csc& csc, int64_t num_edges, int64_t num_destinations, const int64_t* edge_time,
                   const int64_t* source_time) {
  if (csc.is_identity) {
    csc.permutation = Buffer(size_t(num_edges) * 8);
    for (int64_t e = 0; e < num_edges; ++e) csc.permutation.as<int64_t>()[e] = e;
  }
  if (csc.wide_ids) order_lists<int64_t>(csc, num_destinations, edge_time, source_time);
  else order_lists<int32_t>(csc, num_destinations, edge_time, source_time);
  const int64_t* permutation = csc.permutation.as<int64_t>();
  csc.is_identity = std::is_sorted(permutation, permutation + num_edges);
  if (csc.is_identity) csc.permutation = Buffer();
}

}  // namespace hoploom
