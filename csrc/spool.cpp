#include "spool.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace hoploom {
namespace {

template <typename T>
T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Finds the bucket of a key: a table over equal spans gives a start, the bounds decide.
class Buckets {
 public:
  Buckets(const int64_t* bounds, int64_t count) : bounds_(bounds), count_(count) {
    const uint64_t range = uint64_t(bounds[count] - bounds[0]);
    while ((range >> shift_) >= 4096) ++shift_;
    int64_t bucket = 0;
    for (uint64_t slot = 0; slot <= range >> shift_; ++slot) {
      while (bucket + 1 < count && uint64_t(bounds[bucket + 1] - bounds[0]) <= slot << shift_) ++bucket;
      table_.push_back(bucket);
    }
  }
  int64_t of(int64_t key) const {
    if (key < bounds_[0] || key >= bounds_[count_])
      throw std::out_of_range("id " + std::to_string(key) + " is out of range [" + std::to_string(bounds_[0]) + ", " +
                              std::to_string(bounds_[count_]) + ")");
    int64_t bucket = table_[size_t(uint64_t(key - bounds_[0]) >> shift_)];
    while (key >= bounds_[bucket + 1]) ++bucket;
    return bucket;
  }

 private:
  const int64_t* bounds_;
  int64_t count_;
  int shift_ = 0;
  std::vector<int64_t> table_;
};

void copy_row(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes == 4) std::memcpy(to, from, 4);
  else if (bytes == 8) std::memcpy(to, from, 8);
  else std::memcpy(to, from, size_t(bytes));
}

}  // namespace

void pack(const int64_t* keys, int64_t num_rows, const std::vector<Column>& columns, int64_t width,
          const int64_t* bounds, int64_t num_buckets, uint8_t* records, int64_t* counts) {
  const Buckets buckets(bounds, num_buckets);
  std::vector<uint32_t> bucket_of(static_cast<size_t>(num_rows));
  std::fill_n(counts, num_buckets, 0);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t bucket = buckets.of(keys[i]);
    bucket_of[size_t(i)] = uint32_t(bucket);
    ++counts[bucket];
  }
  std::vector<uint8_t*> cursor(static_cast<size_t>(num_buckets));
  for (int64_t b = 0; b < num_buckets; ++b) {
    cursor[size_t(b)] = records;
    records += counts[b] * width;
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    const uint32_t bucket = bucket_of[size_t(i)];
    uint8_t* record = cursor[bucket];
    cursor[bucket] += width;
    const uint32_t local = uint32_t(keys[i] - bounds[bucket]);
    std::memcpy(record, &local, 4);
    for (const Column& column : columns)
      copy_row(record + column.offset, column.values + i * column.row_bytes, column.row_bytes);
  }
}

void place(const Records& records, int64_t num_keys, int64_t offset, int64_t row_bytes, uint8_t* out) {
  std::vector<bool> seen(static_cast<size_t>(num_keys));
  if (records.count != num_keys)
    throw std::out_of_range(std::to_string(records.count) + " rows came for " + std::to_string(num_keys) + " nodes");
  for (int64_t i = 0; i < records.count; ++i) {
    const uint8_t* record = records.bytes + i * records.width;
    const uint32_t key = read<uint32_t>(record);
    if (key >= num_keys || seen[key]) throw std::out_of_range("a node came twice");
    seen[key] = true;
    copy_row(out + int64_t(key) * row_bytes, record + offset, row_bytes);
  }
}

void take(const Records& records, const uint32_t* order, int64_t count, int64_t offset, int64_t row_bytes,
          uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    if (order[i] >= records.count) throw std::out_of_range("order names a record that is not there");
    copy_row(out + i * row_bytes, records.bytes + order[i] * records.width + offset, row_bytes);
  }
}

namespace {

struct Entry {
  int64_t time, source;
  uint32_t record;
};

// Sorts lists of records, one after the other.
class Lists {
 public:
  Lists(const Records& records, const EdgeOrder& how) : records_(records), how_(how) {}

  // Returns the number of records kept, which are moved to the front.
  int64_t sort(uint32_t* begin, uint32_t* end) {
    if (how_.time_offset < 0 && how_.canonical && how_.source_bytes == 4) sort_small(begin, end);
    else if (how_.time_offset >= 0 || how_.canonical) sort_entries(begin, end);
    return how_.deduplicate ? drop_repeated(begin, end) : end - begin;
  }

 private:
  const uint8_t* at(uint32_t record) const { return records_.bytes + int64_t(record) * records_.width; }
  int64_t source(uint32_t record) const {
    return how_.source_bytes == 4 ? int64_t(read<uint32_t>(at(record) + 4)) : read<int64_t>(at(record) + 4);
  }
  bool rest_less(uint32_t a, uint32_t b) const {
    const int64_t skip = 4 + how_.source_bytes;
    const int order = std::memcmp(at(a) + skip, at(b) + skip, size_t(records_.width - skip));
    return order ? order < 0 : a < b;
  }

  // Source and record in one word, which is possible for most lists.
  void sort_small(uint32_t* begin, uint32_t* end) {
    words_.clear();
    for (uint32_t* at = begin; at != end; ++at) words_.push_back(uint64_t(source(*at)) << 32 | *at);
    std::sort(words_.begin(), words_.end());
    for (size_t i = 0; i < words_.size(); ++i) begin[i] = uint32_t(words_[i]);
    if (records_.width == 8) return;
    for (size_t first = 0, last; first < words_.size(); first = last) {
      last = first + 1;
      while (last < words_.size() && words_[last] >> 32 == words_[first] >> 32) ++last;
      if (last - first > 1)
        std::sort(begin + first, begin + last, [this](uint32_t a, uint32_t b) { return rest_less(a, b); });
    }
  }

  void sort_entries(uint32_t* begin, uint32_t* end) {
    entries_.clear();
    for (uint32_t* p = begin; p != end; ++p)
      entries_.push_back({how_.time_offset < 0 ? 0 : read<int64_t>(at(*p) + how_.time_offset), source(*p), *p});
    std::sort(entries_.begin(), entries_.end(), [this](const Entry& a, const Entry& b) {
      if (a.time != b.time) return a.time < b.time;
      if (!how_.canonical) return a.record < b.record;
      return a.source != b.source ? a.source < b.source : rest_less(a.record, b.record);
    });
    for (const Entry& entry : entries_) *begin++ = entry.record;
  }

  int64_t drop_repeated(uint32_t* begin, uint32_t* end) {
    entries_.clear();
    for (uint32_t* p = begin; p != end; ++p) entries_.push_back({p - begin, source(*p), *p});
    std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
      return a.source != b.source ? a.source < b.source : a.time < b.time;
    });
    const auto same = [](const Entry& a, const Entry& b) { return a.source == b.source; };
    entries_.erase(std::unique(entries_.begin(), entries_.end(), same), entries_.end());
    std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.time < b.time; });
    for (const Entry& entry : entries_) *begin++ = entry.record;
    return int64_t(entries_.size());
  }

  const Records& records_;
  const EdgeOrder& how_;
  std::vector<uint64_t> words_;
  std::vector<Entry> entries_;
};

}  // namespace

int64_t order_edges(const Records& records, int64_t num_lists, const EdgeOrder& how, int threads, int64_t* indptr,
                    uint32_t* order) {
  std::fill_n(indptr, num_lists + 1, 0);
  for (int64_t i = 0; i < records.count; ++i) {
    const uint32_t key = read<uint32_t>(records.bytes + i * records.width);
    if (key >= num_lists) throw std::out_of_range("a record belongs to no list");
    ++indptr[key + 1];
  }
  for (int64_t list = 0; list < num_lists; ++list) indptr[list + 1] += indptr[list];
  std::vector<int64_t> cursor(indptr, indptr + num_lists);
  for (int64_t i = 0; i < records.count; ++i)
    order[cursor[read<uint32_t>(records.bytes + i * records.width)]++] = uint32_t(i);

  // The cursors are at the lists' ends now; they move back if a list gets shorter.
  threads = records.count < (1 << 16) ? 1 : std::clamp(threads, 1, 64);
  on_threads(threads, [&](int t) {
    Lists lists(records, how);
    const int64_t end = first_list(indptr, num_lists, t + 1, threads);
    for (int64_t list = first_list(indptr, num_lists, t, threads); list < end; ++list)
      cursor[size_t(list)] = indptr[list] + lists.sort(order + indptr[list], order + indptr[list + 1]);
  });
  if (!how.deduplicate) return records.count;
  int64_t kept = 0;
  for (int64_t list = 0; list < num_lists; ++list) {
    const int64_t begin = indptr[list], end = cursor[size_t(list)];
    std::copy(order + begin, order + end, order + kept);
    indptr[list] = kept;
    kept += end - begin;
  }
  indptr[num_lists] = kept;
  return kept;
}

}  // namespace hoploom
