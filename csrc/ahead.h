// Requests rows some entries ahead of their use, and gives each thread its share of lists.
#pragma once
#include <algorithm>

#include "aggregate.h"
#include "processor.h"
#include "threads.h"

namespace hoploom {

inline constexpr int64_t kLine = 64;
inline constexpr int64_t kAheadBytes = 9600;  // as in gather.cpp
inline constexpr int64_t kSmall = 1 << 15;    // values; for fewer, another thread costs more than it saves

inline int useful(int threads, int64_t values) {
  return int(std::clamp<int64_t>(values / kSmall, 1, std::max(threads, 1)));
}

HOPLOOM_INLINE int64_t entries_ahead(int64_t row_bytes) {
  return std::clamp<int64_t>(kAheadBytes / std::max<int64_t>(row_bytes, 1), 2, 32);
}

HOPLOOM_INLINE void request(const void* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(static_cast<const char*>(row) + at, 0, 3);
}

template <typename T, typename Id>
HOPLOOM_INLINE void request_entry(const RowLists<Id>& lists, const Matrix<T>& x, int64_t entry) {
  if (entry < lists.num_entries)
    request(x.values + int64_t(lists.rows[entry]) * x.stride, x.width * int64_t(sizeof(T)));
}

// Calls work(from, to) for the share of every thread.
template <typename Work>
void in_shares(const int64_t* indptr, int64_t num_lists, int threads, int64_t width, Work work) {
  const int64_t values = (indptr[num_lists] + num_lists) * std::max<int64_t>(width, 1);
  const int used = useful(threads, values);
  on_threads(used,
             [&](int t) { work(first_list(indptr, num_lists, t, used), first_list(indptr, num_lists, t + 1, used)); });
}

}  // namespace hoploom
