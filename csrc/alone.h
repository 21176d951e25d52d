// A lock for data that one thread uses at a time: a second thread gets an error, and the data stays as it was.
#pragma once
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

namespace hoploom {

class Alone {
 public:
  // Held by a thread that writes.
  std::unique_lock<std::shared_mutex> change() const { return taken<std::unique_lock<std::shared_mutex>>(); }
  // Held by threads that read, any number at a time.
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
