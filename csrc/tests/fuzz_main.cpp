// Drives fuzz.cpp where libFuzzer is missing:   fuzz COUNT SEED [SECONDS]
// Input i is a pure function of SEED + i, so that `fuzz 1 <seed of the failure>` runs it again.
#include <chrono>

#include "../random.h"
#include "check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size);
// Called by AddressSanitizer and UndefinedBehaviorSanitizer before they end the program.
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {

uint64_t running_seed = 0;

void name_input() {
  std::fprintf(stderr, "to run this input again: fuzz 1 %llu\n", static_cast<unsigned long long>(running_seed));
}

std::vector<uint8_t> input_of(uint64_t seed) {
  std::vector<uint8_t> bytes(hoploom::mix(seed, ~0ull) % 400);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(hoploom::mix(hoploom::mix(0, seed), i));
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: fuzz COUNT SEED [SECONDS]\n");
    return 2;
  }
  hoploom::test::before_failing = name_input;
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(name_input);
  const uint64_t count = std::strtoull(argv[1], nullptr, 10), seed = std::strtoull(argv[2], nullptr, 10);
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const double seconds = argc > 3 ? std::strtod(argv[3], nullptr) : 1e9;
  uint64_t num_run = 0;
  for (; num_run < count; ++num_run) {
    if (std::chrono::duration<double>(Clock::now() - begin).count() > seconds) break;
    running_seed = seed + num_run;
    const auto bytes = input_of(running_seed);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%llu inputs from seed %llu, no failure\n", static_cast<unsigned long long>(num_run),
              static_cast<unsigned long long>(seed));
  return 0;
}
