// One piece of work on several threads, and ranges of lists that take about the same time.
#pragma once
#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace hoploom {

// Runs work(thread) on every thread and waits. What one of them throws, the caller gets: of several the first.
template <typename Work>
void on_threads(int threads, Work work) {
  std::exception_ptr thrown;
  std::mutex mutex;
  const auto guarded = [&](int thread) {
    try {
      work(thread);
    } catch (...) {
      const std::lock_guard guard(mutex);
      if (!thrown) thrown = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;  // joined even if one cannot be started
    for (int t = 1; t < threads; ++t) others.emplace_back(guarded, t);
    guarded(0);
  }
  if (thrown) std::rethrow_exception(thrown);
}

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
