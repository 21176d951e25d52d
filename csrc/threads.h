// One job on several threads, and ranges of lists of about equal work. Threads stay alive between jobs: starting one
// takes as long as adding up a small batch's rows.
#pragma once
#include <cstdint>
#include <functional>

namespace hoploom {

// Calls work(0), ..., work(threads - 1), once each, and waits. One thread may run several: none may wait for another.
// Rethrows the first exception.
void on_threads(int threads, const std::function<void(int)>& work);

// Returns the first list of thread t: a list counts as much as one entry.
inline int64_t first_list(const int64_t* indptr, int64_t num_lists, int t, int threads) {
  if (t == threads) return num_lists;
  const int64_t share = (indptr[num_lists] - indptr[0] + num_lists) / threads * t;
  int64_t low = 0, high = num_lists;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (indptr[middle] - indptr[0] + middle < share) low = middle + 1;
    else high = middle;
  }
  return low;
}

}  // namespace hoploom
