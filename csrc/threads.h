// One piece of work on several threads, and ranges of lists that take about the same time. Threads that have worked
// wait for the next piece: starting one takes as long as adding up a small batch's rows.
#pragma once
#include <cstdint>
#include <functional>

namespace hoploom {

// work(0), ..., work(threads - 1), each once, and waits. Several may run one after the other on one thread: no piece
// may wait for another one. What one of them throws, the caller gets: of several the first.
void on_threads(int threads, const std::function<void(int)>& work);

// The first list of thread t: lists and their entries weigh alike.
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
