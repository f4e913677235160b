// Words seen before and their ids, found by the words' own bytes: never a wrong answer, and a bounded size.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "id_buffer.h"
#include "model.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

// One thread's memory of words. Sets of two entries, one cache line each: words of up to 15 bytes and a few ids stand in
// them; the rest goes to LongWords.
template <class Id>
class WordCache {
 public:
  explicit WordCache(const Model& model) : model_(model) {
    const size_t bytes = kNumSets * 64;
    memory_ = static_cast<uint8_t*>(std::calloc(1, bytes + kHugePage));  // because: pages nobody touches cost nothing
    if (memory_ == nullptr) throw std::bad_alloc();
    entries_ = reinterpret_cast<Entry*>((reinterpret_cast<uintptr_t>(memory_) + kHugePage - 1) & ~(kHugePage - 1));
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(entries_, bytes, MADV_HUGEPAGE);
#endif
  }
  WordCache(const WordCache&) = delete;
  WordCache& operator=(const WordCache&) = delete;
  ~WordCache() { std::free(memory_); }

  void encode(const Words& words, IdBuffer<Id>& out) {
    if (words.count == 0) return;
    const size_t num_bytes = words.ends[words.count - 1] - words.starts[0];
    Id* ids = out.reserve(num_bytes + kIds);  // a word has at most as many ids as bytes
    for (size_t first = 0; first < words.count; first += kGroup) {
      const size_t count = words.count - first < kGroup ? words.count - first : kGroup;
      for (size_t i = 0; i < count; ++i) prepare(words, first + i, ready_[i]);  // memory is fetched meanwhile
      for (size_t i = 0; i < count; ++i) ids = look_up(ready_[i], ids);
    }
    out.set_end(ids);
  }

 private:
  static constexpr size_t kNumSets = 1 << 18;
  static constexpr size_t kGroup = 64;
  static constexpr size_t kHugePage = 2 << 20;
  static constexpr size_t kIds = (16 - sizeof(Id)) / sizeof(Id);
  static constexpr size_t kKeyBytes = 15;

  struct alignas(32) Entry {
    uint64_t low, high;  // the word's bytes, zeroes behind them, and its length in the last byte
    Id ids[kIds];
    Id count;  // 0: no entry
  };
  static_assert(sizeof(Entry) == 32, "two entries fill a cache line");

  struct Ready {
    uint64_t low, high;
    Entry* set;
    const uint8_t* word;
    uint32_t size;
  };

  static uint64_t mix(uint64_t low, uint64_t high) {
    uint64_t h = low * 0x9E3779B97F4A7C15u ^ high * 0xC2B2AE3D27D4EB4Fu;
    h ^= h >> 32;
    return h * 0xD6E8FEB86659FD93u;
  }

  inline void prepare(const Words& words, size_t i, Ready& r) {
    r.word = words.text + words.starts[i];
    r.size = words.ends[i] - words.starts[i];
    const size_t n = r.size < kKeyBytes ? r.size : kKeyBytes;
    load_key(r.word, n, r.low, r.high);
    r.set = entries_ + 2 * (mix(r.low, r.high) >> 24 & (kNumSets - 1));
    __builtin_prefetch(r.set);
  }

  // By length: which bits of a key are the word's, and the length itself.
  struct Mask {
    uint64_t low, high, length;
  };
  static constexpr std::array<Mask, kKeyBytes + 1> masks() {
    std::array<Mask, kKeyBytes + 1> table{};
    for (size_t n = 0; n <= kKeyBytes; ++n) {
      table[n] = {n >= 8 ? ~uint64_t{0} : (uint64_t{1} << n * 8) - 1, n > 8 ? (uint64_t{1} << (n - 8) * 8) - 1 : 0,
                  uint64_t{n} << 56};
    }
    return table;
  }
  static constexpr std::array<Mask, kKeyBytes + 1> kMasks = masks();

  static void load_key(const uint8_t* word, size_t n, uint64_t& low, uint64_t& high) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    std::memcpy(&low, word, 8);  // beyond the word, but inside the window
    std::memcpy(&high, word + 8, 8);
    low &= kMasks[n].low;
    high = (high & kMasks[n].high) | kMasks[n].length;
#else
    uint8_t key[16] = {};
    std::memcpy(key, word, n);
    key[15] = n;
    std::memcpy(&low, key, 8);
    std::memcpy(&high, key + 8, 8);
#endif
  }

  static bool holds(const Entry& e, const Ready& r) { return ((e.low ^ r.low) | (e.high ^ r.high)) == 0; }

  inline Id* look_up(const Ready& r, Id* ids) {
    if (__builtin_expect(r.size > kKeyBytes, 0)) return look_up_long(r, ids);
    if (__builtin_expect(holds(r.set[0], r), 1)) return copy(r.set[0], ids);
    if (!holds(r.set[1], r)) return encode_anew(r, ids);
    std::swap(r.set[0], r.set[1]);
    return copy(r.set[0], ids);
  }

  static Id* copy(const Entry& e, Id* ids) {
    std::memcpy(ids, e.ids, sizeof e.ids);  // always all: a count would be a branch
    return ids + e.count;
  }

  __attribute__((noinline)) Id* encode_anew(const Ready& r, Id* ids) {
    LongSlot slot;
    const size_t number = static_cast<size_t>(r.set - entries_) / 2;
    if (has_long_[number] && find_long(r, slot)) return copy(*slot.word, ids);
    uint32_t found[kKeyBytes];
    const size_t count = model_.encode_word(r.word, r.size, found, scratch_);
    for (size_t i = 0; i < count; ++i) ids[i] = static_cast<Id>(found[i]);
    if (count > kIds) {
      has_long_[number] = true;
      keep_long(r, ids, ids + count);
    } else {
      Entry& e = r.set[0].count ? r.set[1] : r.set[0];  // a new word takes the second place, and moves up if seen again
      e.low = r.low;
      e.high = r.high;
      e.count = static_cast<Id>(count);
      for (size_t i = 0; i < count; ++i) e.ids[i] = ids[i];
    }
    return ids + count;
  }

  // ---- words of more than 15 bytes, or more ids than an entry holds

  static constexpr size_t kLongSlots = 1 << 16;
  static constexpr size_t kLongestKept = 512;
  static constexpr size_t kMostLongBytes = 8 << 20;

  struct LongWord {
    uint64_t hash = 0;  // 0: no entry
    uint32_t at = 0;    // in long_bytes_: the word, then its ids
    uint16_t size = 0, count = 0;
  };

  struct LongSlot {
    LongWord* word;
    uint64_t hash;
  };

  // Where a word is, or belongs.
  bool find_long(const Ready& r, LongSlot& found) {
    if (long_words_.empty()) long_words_.resize(kLongSlots);
    found.hash = hash_of(r.word, r.size) | 1;
    for (size_t slot = found.hash >> 40;; ++slot) {
      found.word = &long_words_[slot & (kLongSlots - 1)];
      const LongWord& w = *found.word;
      if (w.hash == 0) return false;
      if (w.hash == found.hash && w.size == r.size && std::memcmp(&long_bytes_[w.at], r.word, r.size) == 0) return true;
    }
  }

  Id* copy(const LongWord& w, Id* ids) const {
    std::memcpy(ids, &long_bytes_[w.at + w.size], w.count * sizeof(Id));
    return ids + w.count;
  }

  __attribute__((noinline)) Id* look_up_long(const Ready& r, Id* ids) {
    LongSlot slot;
    if (r.size <= kLongestKept && find_long(r, slot)) return copy(*slot.word, ids);
    Id* const end = encode_long(r, ids);
    if (r.size <= kLongestKept) keep_long(r, ids, end);
    return end;
  }

  static uint64_t hash_of(const uint8_t* p, size_t n) {
    uint64_t hash = n, eight = 0;
    for (; n >= 8; n -= 8, p += 8) {
      std::memcpy(&eight, p, 8);
      hash = mix(hash, eight);
    }
    eight = 0;
    std::memcpy(&eight, p, n);
    return mix(hash, eight);
  }

  Id* encode_long(const Ready& r, Id* ids) {
    long_ids_.resize(r.size);
    const size_t count = model_.encode_word(r.word, r.size, long_ids_.data(), scratch_);
    for (size_t i = 0; i < count; ++i) ids[i] = static_cast<Id>(long_ids_[i]);
    if (r.size > (64 << 10)) {
      scratch_ = Scratch{};  // because: one giant word must not hold its memory for ever
      long_ids_ = {};
    }
    return ids + count;
  }

  void keep_long(const Ready& r, const Id* ids, const Id* end) {
    if (num_long_ * 2 > kLongSlots || long_bytes_.size() > kMostLongBytes) {  // full: all are forgotten
      std::fill(long_words_.begin(), long_words_.end(), LongWord{});
      long_bytes_.clear();
      num_long_ = 0;
    }
    LongSlot slot;
    find_long(r, slot);
    const auto* bytes = reinterpret_cast<const uint8_t*>(ids);
    *slot.word = {slot.hash, static_cast<uint32_t>(long_bytes_.size()), static_cast<uint16_t>(r.size),
                  static_cast<uint16_t>(end - ids)};
    long_bytes_.insert(long_bytes_.end(), r.word, r.word + r.size);
    long_bytes_.insert(long_bytes_.end(), bytes, bytes + static_cast<size_t>(end - ids) * sizeof(Id));
    ++num_long_;
  }

  const Model& model_;
  Scratch scratch_;
  uint8_t* memory_;
  Entry* entries_;
  Ready ready_[kGroup];
  std::vector<LongWord> long_words_;
  std::vector<uint8_t> long_bytes_;
  std::vector<uint32_t> long_ids_;
  size_t num_long_ = 0;
  std::vector<bool> has_long_ = std::vector<bool>(kNumSets);  // words of this set are among the long ones
};
