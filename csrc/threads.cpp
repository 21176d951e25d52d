#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace hoploom {
namespace {

// A job, on the caller's stack until all pieces are done.
struct Job {
  Job(const std::function<void(int)>& work, int threads) : work(work), threads(threads), wanted(threads - 1) {}

  const std::function<void(int)>& work;
  int threads;
  int wanted;  // helpers that may still join
  int helpers = 0;
  Job* next = nullptr;
  std::atomic<int> piece{0};
  std::mutex mutex;
  std::exception_ptr thrown;

  void run() {
    for (int t = piece.fetch_add(1); t < threads; t = piece.fetch_add(1)) {
      try {
        work(t);
      } catch (...) {
        const std::lock_guard guard(mutex);
        if (!thrown) thrown = std::current_exception();
      }
    }
  }
};

// A pool of threads. The caller works, too, so a job ends even if no helper can be started.
class Crew {
 public:
  void run(Job& job) {
    {
      const std::lock_guard guard(mutex_);
      job.next = jobs_;
      jobs_ = &job;
      promised_ += job.wanted;
      while (idle_ < promised_ && num_helpers_ < most_helpers_ && start_helper()) {
      }
    }
    for (int helper = 1; helper < job.threads; ++helper) wake_.notify_one();
    job.run();
    std::unique_lock lock(mutex_);
    if (job.wanted) leave(job);
    done_.wait(lock, [&] { return job.helpers == 0; });
  }

 private:
  bool start_helper() {
    try {
      std::thread([this] { help(); }).detach();
    } catch (...) {  // no thread or no memory: the caller's stack must outlive the job anyway
      return false;
    }
    ++num_helpers_;
    ++idle_;  // it counts as idle until it takes a job
    return true;
  }
  void help() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return jobs_ != nullptr; });
      Job& job = *jobs_;
      --idle_;
      --promised_;
      ++job.helpers;
      if (--job.wanted == 0) leave(job);
      lock.unlock();
      job.run();
      lock.lock();
      ++idle_;
      if (--job.helpers == 0) done_.notify_all();
    }
  }
  // No helper may join from here on.
  void leave(Job& job) {
    Job** link = &jobs_;
    while (*link != &job) link = &(*link)->next;
    *link = job.next;
    promised_ -= job.wanted;
    job.wanted = 0;
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* jobs_ = nullptr;
  int idle_ = 0, promised_ = 0, num_helpers_ = 0;
  const int most_helpers_ = std::max(64, int(std::thread::hardware_concurrency()));
};

// Never destroyed: helpers wait in it until the process ends. A child process has none of its parent's threads.
std::atomic<Crew*> crew{nullptr};

Crew& the_crew() {
  static const bool is_made = [] {
    crew = new Crew;
    pthread_atfork(nullptr, nullptr, [] { crew = new Crew; });
    return true;
  }();
  (void)is_made;
  return *crew;
}

}  // namespace

void on_threads(int threads, const std::function<void(int)>& work) {
  if (threads <= 1) return work(0);
  Job job(work, threads);
  the_crew().run(job);
  if (job.thrown) std::rethrow_exception(job.thrown);
}

}  // namespace hoploom
