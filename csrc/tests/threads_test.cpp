// on_threads: every piece once, whoever is free, errors, and children of a process with helpers.
#include "../threads.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "check.h"

using namespace hoploom;
using namespace hoploom::test;

namespace {

// How often each piece was worked on.
std::vector<int> counts_of(int threads) {
  std::vector<int> counts(size_t(std::max(threads, 1)));
  on_threads(threads, [&](int t) { ++counts[size_t(t)]; });
  return counts;
}

}  // namespace

TEST(every_piece_is_worked_on_once) {
  for (int round = 0; round < 200; ++round)
    for (int threads : {1, 2, 3, 8}) CHECK_EQUAL(counts_of(threads), std::vector<int>(size_t(threads), 1));
  CHECK_EQUAL(counts_of(0), std::vector<int>(1, 1));
  CHECK_EQUAL(counts_of(200), std::vector<int>(200, 1));  // more than there are helpers
}

TEST(callers_at_once_and_pieces_of_pieces_all_end) {
  std::atomic<int> pieces = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) on_threads(4, [&](int) { on_threads(3, [&](int) { ++pieces; }); });
    });
  for (auto& caller : callers) caller.join();
  CHECK_EQUAL(pieces.load(), 6 * 50 * 12);
}

TEST(what_a_piece_throws_the_caller_gets_when_all_have_ended) {
  std::atomic<int> ended = 0;
  const std::string error = thrown_by([&] {
    on_threads(5, [&](int t) {
      ++ended;
      if (t % 2) throw std::out_of_range("an odd piece");
    });
  });
  CHECK_EQUAL(error, std::string("an odd piece"));
  CHECK_EQUAL(ended.load(), 5);
  CHECK_EQUAL(counts_of(5), std::vector<int>(5, 1));
}

#ifndef __SANITIZE_THREAD__  // which allows a child of several threads no thread of its own
TEST(a_child_process_has_helpers_of_its_own) {
  counts_of(3);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(counts_of(3) == std::vector<int>(3, 1) ? 0 : 1);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(without_memory_for_helpers_the_caller_does_all_pieces) {
  const pid_t child = fork();  // which has no helpers yet
  if (child == 0) {
    alarm(20);
    std::vector<int> counts(3);
    const std::function<void(int)> work = [&](int t) { ++counts[size_t(t)]; };
    has_no_memory = true;
    on_threads(3, work);
    has_no_memory = false;
    _exit(counts == std::vector<int>(3, 1) ? 0 : 1);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif
