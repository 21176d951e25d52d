// Drives fuzz.cpp where libFuzzer is missing:   fuzz COUNT SEED [SECONDS]
// Input i is a pure function of SEED + i, so that `fuzz 1 <seed of the failure>` runs it again.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../random.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size);

namespace {

// Written by the process that runs the inputs, read by its parent when it is dead.
struct Progress {
  uint64_t seed, num_run;
};

std::vector<uint8_t> input_of(uint64_t seed) {
  std::vector<uint8_t> bytes(hoploom::mix(seed, ~0ull) % 400);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(hoploom::mix(hoploom::mix(0, seed), i));
  return bytes;
}

void run_inputs(Progress& progress, uint64_t count, uint64_t seed, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  for (; progress.num_run < count; ++progress.num_run) {
    if (std::chrono::duration<double>(Clock::now() - begin).count() > seconds) break;
    progress.seed = seed + progress.num_run;
    const auto bytes = input_of(progress.seed);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: fuzz COUNT SEED [SECONDS]\n");
    return 2;
  }
  const uint64_t count = std::strtoull(argv[1], nullptr, 10), seed = std::strtoull(argv[2], nullptr, 10);
  const double seconds = argc > 3 ? std::strtod(argv[3], nullptr) : 1e9;
  void* shared = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  auto* progress = static_cast<Progress*>(shared);
  const pid_t child = fork();
  if (child == 0) {
    run_inputs(*progress, count, seed, seconds);
    return 0;
  }
  int status = 1;
  if (child > 0) waitpid(child, &status, 0);
  if (status != 0) {
    std::fprintf(stderr, "to run this input again: fuzz 1 %llu\n", static_cast<unsigned long long>(progress->seed));
    return 1;
  }
  std::printf("%llu inputs from seed %llu, no failure\n", static_cast<unsigned long long>(progress->num_run),
              static_cast<unsigned long long>(seed));
}
