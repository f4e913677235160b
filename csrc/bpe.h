// Byte-level BPE: the pairs of a word merge in the order of their rank.
#pragma once

#include <array>
#include <string>
#include <unordered_map>

#include "model.h"

struct Merge {
  uint32_t left, right, merged;
};

class Bpe final : public Model {
 public:
  // `whole`: words that are one id whatever the merges say.
  Bpe(Pattern pattern, const std::array<uint32_t, 256>& byte_ids, const std::vector<Merge>& merges,
      std::unordered_map<std::string, uint32_t> whole);

  std::unique_ptr<Cutter> make_cutter() const override { return std::make_unique<PatternCutter>(pattern_); }
  size_t encode_word(const uint8_t* word, size_t n, uint32_t* ids, Scratch& scratch) const override;

  static constexpr uint32_t kMostIds = 1u << 21, kMostMerges = (1u << 22) - 1;

 private:
  uint32_t rank_of(uint32_t left, uint32_t right) const;
  size_t merge_short(const uint8_t* word, size_t n, uint32_t* ids) const;
  size_t merge_long(const uint8_t* word, size_t n, uint32_t* ids, Scratch& scratch) const;

  Pattern pattern_;
  std::array<uint32_t, 256> byte_ids_;
  std::vector<uint64_t> pairs_;  // a hash table: 42 bits of two ids, 22 of their rank
  uint64_t mask_ = 0;
  std::vector<uint32_t> merged_;      // by rank
  std::vector<uint32_t> byte_ranks_;  // of all pairs of bytes
  std::unordered_map<std::string, uint32_t> whole_;
};
