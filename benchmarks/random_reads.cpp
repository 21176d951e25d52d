// Independent 4-byte reads at random places: the rate at which a core can be fed from memory.
#include <cstdint>

extern "C" uint64_t random_reads(const uint32_t* entries, uint64_t num_entries, uint64_t num_reads,
                                 uint64_t first) {
  uint64_t sum = 0;
  for (uint64_t i = first; i < first + num_reads; ++i) {
    // A counter through one multiply-shift round: far cheaper than the read it places.
    uint64_t word = i * 0x9E3779B97F4A7C15ull;
    word = (word ^ (word >> 32)) * 0xD6E8FEB86659FD93ull;
    sum += entries[(word >> 32) * num_entries >> 32];
  }
  return sum;
}
