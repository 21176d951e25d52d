// Runs every test linked in, or those whose name contains the argument:   core_test damaged
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "../order.h"
#include "../random.h"
#include "check.h"

using namespace hoploom;
using namespace hoploom::test;

[[gnu::noinline]] void* operator new(size_t size) {
  if (!has_no_memory)
    if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return has_no_memory ? nullptr : std::malloc(size ? size : 1);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

// The known answers of Random123 for philox4x32-10.
TEST(philox_gives_the_published_words) {
  const auto words = [](uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    std::vector<uint32_t> block(4);
    philox(key, c0, c1, c2, c3, block.data());
    return block;
  };
  CHECK_EQUAL(words(0, 0, 0, 0, 0), (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK_EQUAL(words(~0ull, ~0u, ~0u, ~0u, ~0u),
              (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK_EQUAL(words(0x299f31d0a4093822, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
              (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The first outputs of splitmix64 seeded with 0: its state steps by the golden ratio.
TEST(mix_is_splitmix64) {
  CHECK_EQUAL(mix(0, 0), 0xE220A8397B1DCDAFull);
  CHECK_EQUAL(mix(0, 0x9E3779B97F4A7C15ull), 0x6E789E6AA1B965F4ull);
}

TEST(a_draw_does_not_depend_on_the_draws_before_it) {
  Draws forward(5, -9, 2);
  std::vector<uint32_t> words;
  for (uint64_t draw = 0; draw < 40; ++draw) words.push_back(forward.word(draw));
  for (uint64_t draw : {39u, 3u, 4u, 0u, 38u, 4u}) CHECK_EQUAL(Draws(5, -9, 2).word(draw), words[draw]);
  CHECK_EQUAL(forward.wide(3), uint64_t(words[6]) << 32 | words[7]);
}

TEST(unit_draws_are_strictly_inside_zero_and_one) {
  double sum = 0;
  Draws draws(1, 2, 3);
  for (uint64_t draw = 0; draw < 10000; ++draw) {
    const double unit = draws.unit(draw);
    CHECK(0 < unit && unit < 1);
    sum += unit;
  }
  CHECK_BETWEEN(4850.0, sum, 5150.0);  // five standard deviations are 144
}

namespace {
void check_bijection(uint64_t key, uint64_t size) {
  const Permutation permutation(key, size);
  std::vector<bool> hit(size);
  for (uint64_t i = 0; i < size; ++i) {
    const uint64_t value = permutation.at(i);
    CHECK(value < size && !hit[value]);
    hit[value] = true;
  }
}
}  // namespace

TEST(a_permutation_is_a_bijection_for_every_size_to_2000) {
  for (uint64_t size = 1; size <= 2000; ++size) check_bijection(size * 31, size);
}

TEST(a_permutation_is_a_bijection_around_powers_of_two) {
  for (uint64_t size : {4096u, 65535u, 65536u, 65537u, 131073u}) check_bijection(11, size);
}

TEST(a_permutation_of_a_huge_range_stays_inside_and_does_not_repeat) {
  for (uint64_t size : {(1ull << 32) + 1, (1ull << 62) - 57, ~0ull}) {
    const Permutation permutation(3, size);
    std::vector<uint64_t> values;
    for (uint64_t i = 0; i < 1000; ++i) values.push_back(permutation.at(size - 1 - i * (size / 1000)));
    for (uint64_t value : values) CHECK(value < size);
    for (size_t i = 0; i < values.size(); ++i)
      for (size_t j = 0; j < i; ++j) CHECK(values[i] != values[j]);
  }
}

TEST(another_key_is_another_permutation) {
  const Permutation one(1, 1000), other(2, 1000);
  int equal = 0, fixed = 0;
  for (uint64_t i = 0; i < 1000; ++i) equal += one.at(i) == other.at(i), fixed += one.at(i) == i;
  CHECK_BETWEEN(0, equal, 8);  // one is expected, of a Poisson distribution
  CHECK_BETWEEN(0, fixed, 8);
}

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  int num_run = 0;
  const auto begin = Clock::now();
  for (const Test& test : tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    const auto started = Clock::now();
    const std::string error = thrown_by(test.body);
    if (!error.empty()) fail(test.name, 0, "threw: " + error);
    const double seconds = std::chrono::duration<double>(Clock::now() - started).count();
    std::printf("ok %6.3f s  %s\n", seconds, test.name);
    std::fflush(stdout);
    ++num_run;
  }
  std::printf("%d tests passed in %.1f s\n", num_run, std::chrono::duration<double>(Clock::now() - begin).count());
  return num_run ? 0 : 1;
}
