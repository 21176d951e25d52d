// Polls a socket for a moment before a blocking wait: a sleeping processor wakes up later than most responses arrive.
#pragma once
#include <cstdint>

namespace hoploom {

// Returns true once there is data, or the other end has closed; false after `microseconds` or on an error.
bool wait_readable(int descriptor, int64_t microseconds);

}  // namespace hoploom
