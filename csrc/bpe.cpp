#include "bpe.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace {

constexpr uint32_t kNone = (1u << 22) - 1;  // no rank: the pair does not merge
constexpr uint32_t kEnd = UINT32_MAX;
constexpr size_t kShort = 32;  // bytes; beyond, looking for the best pair in all is slower than a heap
constexpr uint64_t kEmpty = UINT64_MAX;

uint64_t slot_of(uint64_t pair) { return (pair * 0x9E3779B97F4A7C15u) >> 32; }

}  // namespace

Bpe::Bpe(Pattern pattern, const std::array<uint32_t, 256>& byte_ids, const std::vector<Merge>& merges,
         std::unordered_map<std::string, uint32_t> whole)
    : pattern_(pattern), byte_ids_(byte_ids), whole_(std::move(whole)) {
  if (merges.size() > kMostMerges) throw std::invalid_argument("too many merges");
  size_t slots = 1024;
  while (slots < merges.size() * 5 / 2) slots *= 2;
  pairs_.assign(slots, kEmpty);
  mask_ = slots - 1;
  for (const uint32_t id : byte_ids_) {
    if (id >= kMostIds) throw std::invalid_argument("an id is too large");
  }
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& m = merges[rank];
    if (m.left >= kMostIds || m.right >= kMostIds || m.merged >= kMostIds) throw std::invalid_argument("an id is too large");
    const uint64_t pair = uint64_t{m.left} << 21 | m.right;
    uint64_t slot = slot_of(pair) & mask_;
    while (pairs_[slot] != kEmpty && pairs_[slot] >> 22 != pair) slot = (slot + 1) & mask_;
    pairs_[slot] = pair << 22 | rank;  // a pair that stands twice has the later rank
    merged_.push_back(m.merged);
  }
  byte_ranks_.resize(1 << 16);
  for (size_t i = 0; i < byte_ranks_.size(); ++i) byte_ranks_[i] = rank_of(byte_ids_[i >> 8], byte_ids_[i & 255]);
}

inline uint32_t Bpe::rank_of(uint32_t left, uint32_t right) const {
  const uint64_t pair = uint64_t{left} << 21 | right;
  for (uint64_t slot = slot_of(pair) & mask_;; slot = (slot + 1) & mask_) {
    const uint64_t found = pairs_[slot];
    if (found >> 22 == pair) return static_cast<uint32_t>(found) & kNone;
    if (found == kEmpty) return kNone;
  }
}

size_t Bpe::encode_word(const uint8_t* word, size_t n, uint32_t* ids, Scratch& scratch) const {
  if (!whole_.empty()) {
    const auto found = whole_.find(std::string(reinterpret_cast<const char*>(word), n));
    if (found != whole_.end()) {
      ids[0] = found->second;
      return 1;
    }
  }
  return n <= kShort ? merge_short(word, n, ids) : merge_long(word, n, ids, scratch);
}

size_t Bpe::merge_short(const uint8_t* word, size_t n, uint32_t* ids) const {
  uint32_t keys[kShort];  // the rank of the pair that begins at a symbol
  for (size_t i = 0; i < n; ++i) ids[i] = byte_ids_[word[i]];
  for (size_t i = 0; i + 1 < n; ++i) keys[i] = byte_ranks_[size_t{word[i]} << 8 | word[i + 1]];
  while (n > 1) {
    uint32_t best = keys[0];
    for (size_t i = 1; i + 1 < n; ++i) best = keys[i] < best ? keys[i] : best;
    if (best == kNone) break;
    size_t at = 0;
    while (keys[at] != best) ++at;
    ids[at] = merged_[best];
    for (size_t i = at + 1; i + 1 < n; ++i) {
      ids[i] = ids[i + 1];
      keys[i] = keys[i + 1];
    }
    --n;
    if (at > 0) keys[at - 1] = rank_of(ids[at - 1], ids[at]);
    if (at + 1 < n) keys[at] = rank_of(ids[at], ids[at + 1]);
  }
  return n;
}

size_t Bpe::merge_long(const uint8_t* word, size_t n, uint32_t* ids, Scratch& scratch) const {
  auto &next = scratch.next, &previous = scratch.previous, &symbols = scratch.symbols, &ranks = scratch.ranks;
  auto& heap = scratch.heap;  // rank, then position; entries whose pair is gone stay until they come up
  next.resize(n);
  previous.resize(n);
  symbols.resize(n);
  ranks.resize(n);
  heap.clear();
  for (size_t i = 0; i < n; ++i) {
    next[i] = i + 1 < n ? static_cast<uint32_t>(i + 1) : kEnd;
    previous[i] = i ? static_cast<uint32_t>(i - 1) : kEnd;
    symbols[i] = byte_ids_[word[i]];
    ranks[i] = i + 1 < n ? byte_ranks_[size_t{word[i]} << 8 | word[i + 1]] : kNone;
    if (ranks[i] != kNone) heap.push_back(uint64_t{ranks[i]} << 32 | i);
  }
  const auto later = std::greater<uint64_t>();
  std::make_heap(heap.begin(), heap.end(), later);
  const auto look_again = [&](uint32_t i) {
    ranks[i] = next[i] == kEnd ? kNone : rank_of(symbols[i], symbols[next[i]]);
    if (ranks[i] == kNone) return;
    heap.push_back(uint64_t{ranks[i]} << 32 | i);
    std::push_heap(heap.begin(), heap.end(), later);
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const auto rank = static_cast<uint32_t>(heap.back() >> 32), i = static_cast<uint32_t>(heap.back());
    heap.pop_back();
    if (ranks[i] != rank) continue;
    const uint32_t gone = next[i];
    symbols[i] = merged_[rank];
    ranks[gone] = kNone;
    next[i] = next[gone];
    if (next[i] != kEnd) previous[next[i]] = i;
    look_again(i);
    if (previous[i] != kEnd) look_again(previous[i]);
  }
  size_t count = 0;
  for (uint32_t i = 0; i != kEnd; i = next[i]) ids[count++] = symbols[i];
  return count;
}
