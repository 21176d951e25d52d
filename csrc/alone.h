// For what one thread uses at a time: a second one meanwhile gets an error, and the map stays as it was.
#pragma once
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

namespace hoploom {

class Alone {
 public:
  // Held while something changes.
  std::unique_lock<std::shared_mutex> change() const { return taken<std::unique_lock<std::shared_mutex>>(); }
  // Held while something is read, by any number of threads.
  std::shared_lock<std::shared_mutex> read() const { return taken<std::shared_lock<std::shared_mutex>>(); }

 private:
  template <typename Lock>
  Lock taken() const {
    Lock lock(mutex_, std::try_to_lock);
    if (!lock) throw std::logic_error("two threads use one map at the same time; give each thread its own");
    return lock;
  }
  mutable std::shared_mutex mutex_;
};

}  // namespace hoploom
