#include "idranks.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "processor.h"

namespace hoploom {
namespace {

constexpr int64_t kAhead = 16;  // words prefetched ahead

void check_places(const int64_t* places, int64_t count, int64_t num_ids) {
  uint64_t worst = 0;
  for (int64_t i = 0; i < count; ++i) worst = std::max(worst, uint64_t(places[i]));
  if (count && worst >= uint64_t(num_ids))
    throw std::out_of_range("place " + std::to_string(int64_t(worst)) + " is out of range [0, " +
                            std::to_string(num_ids) + ")");
}

struct Outputs {
  int64_t *slots, *hits, *misses;
  int64_t num_hits = 0, num_misses = 0;
};

// Without branches on the result, which would be mispredicted.
template <typename Places>
HOPLOOM_INLINE void look_up(const IdRanks::Word* words, int64_t first, int64_t span, const int64_t* ids, Places places,
                            int64_t count, Outputs* out) {
  int64_t num_hits = 0, num_misses = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const uint64_t later = uint64_t(ids[places[i + kAhead]]) - uint64_t(first);
      if (later < uint64_t(span)) __builtin_prefetch(&words[later >> 6]);
    }
    const int64_t place = places[i];
    const uint64_t at = uint64_t(ids[place]) - uint64_t(first);
    const bool is_within = at < uint64_t(span);
    const IdRanks::Word word = words[is_within ? at >> 6 : 0];
    const bool is_hit = is_within && (word.bits >> (at & 63) & 1);
    out->slots[place] = word.before + std::popcount(word.bits & ((uint64_t(1) << (at & 63)) - 1));
    out->hits[num_hits] = place;
    out->misses[num_misses] = place;
    num_hits += is_hit;
    num_misses += !is_hit;
  }
  out->num_hits = num_hits;
  out->num_misses = num_misses;
}

struct Everywhere {
  int64_t operator[](int64_t i) const { return i; }
};

}  // namespace

int64_t IdRanks::bytes_of(int64_t first, int64_t last) {
  return last < first ? 0 : int64_t(((uint64_t(last) - uint64_t(first)) >> 6) + 1) * int64_t(sizeof(Word));
}

IdRanks::IdRanks(const int64_t* ids, int64_t count) : size_(count) {
  for (int64_t i = 1; i < count; ++i)
    if (ids[i] <= ids[i - 1]) throw std::invalid_argument("ids must ascend");
  if (count == 0) return;
  first_ = ids[0];
  const uint64_t span = uint64_t(ids[count - 1]) - uint64_t(first_);
  if (span >= uint64_t(1) << 56) throw std::length_error("ids lie too far apart");
  span_ = int64_t(span) + 1;
  words_ = Buffer(size_t(bytes_of(ids[0], ids[count - 1])));
  Word* words = words_.as<Word>();
  const int64_t num_words = (span_ + 63) / 64;
  std::fill_n(words, num_words, Word{0, 0});
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = ids[i] - first_;
    words[at >> 6].bits |= uint64_t(1) << (at & 63);
  }
  for (int64_t w = 1; w < num_words; ++w) words[w].before = words[w - 1].before + std::popcount(words[w - 1].bits);
}

IdMap::Found IdRanks::find(const int64_t* ids, int64_t num_ids, const int64_t* places, int64_t count) const {
  if (places) check_places(places, count, num_ids);
  // One position more, for the last value, which is written but not counted.
  IdMap::Found found{Buffer(size_t(num_ids) * 8), Buffer(size_t(count + 1) * 8), Buffer(size_t(count + 1) * 8)};
  Outputs out{found.slots.as<int64_t>(), found.hits.as<int64_t>(), found.misses.as<int64_t>()};
  const Word nothing = {0, 0};
  const Word* words = size_ ? words_.as<Word>() : &nothing;
  if (places) run_fastest<look_up<const int64_t*>>(words, first_, span_, ids, places, count, &out);
  else run_fastest<look_up<Everywhere>>(words, first_, span_, ids, Everywhere{}, count, &out);
  found.hits.trim(size_t(out.num_hits) * 8);
  found.misses.trim(size_t(out.num_misses) * 8);
  return found;
}

Buffer IdRanks::copy_ids() const {
  Buffer out(size_t(size_) * 8);
  int64_t number = 0;
  for (int64_t w = 0; w < (span_ + 63) / 64; ++w)
    for (uint64_t bits = words_.as<Word>()[w].bits; bits; bits &= bits - 1)
      out.as<int64_t>()[number++] = first_ + w * 64 + std::countr_zero(bits);
  return out;
}

}  // namespace hoploom
