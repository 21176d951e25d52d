#include "readable.h"

#include <poll.h>
#include <sched.h>

#include <chrono>

namespace hoploom {

bool wait_readable(int descriptor, int64_t microseconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::microseconds(microseconds);
  pollfd asked{descriptor, POLLIN, 0};
  do {
    const int ready = poll(&asked, 1, 0);
    if (ready != 0) return ready > 0;
    sched_yield();  // lets other threads run first
  } while (Clock::now() < end);
  return false;
}

}  // namespace hoploom
