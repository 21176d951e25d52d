// Whether a socket has something to read, asked again and again for a moment: a processor that falls asleep wakes up
// later than most answers come.
#pragma once
#include <cstdint>

namespace hoploom {

// True as soon as there is something, or the other end has closed; false after so many microseconds, or on an error.
bool wait_readable(int descriptor, int64_t microseconds);

}  // namespace hoploom
