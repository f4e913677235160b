// BERT's normalizer and pre-tokenizer: text is cleaned, Chinese characters stand alone, accents and case may go, and
// words end at white space and punctuation.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "words.h"

// What becomes of each character; shared by threads.
class BertRules {
 public:
  BertRules(bool clean, bool cjk, bool strip, bool lower);

  static constexpr uint8_t kGone = 0xFF;
  static constexpr size_t kMostGrowth = 3;  // a text becomes at most so many times as long

  uint8_t ascii(uint8_t c) const { return ascii_[c]; }  // kGone if nothing
  bool lower() const { return lower_; }

  // kVanishes leaves no trace; kBecomes, also nothing, is a place that no combining character moves across. The bytes of
  // kCombines are parts: a combining class, a size, and so many bytes.
  enum Kind : uint32_t { kSame, kBecomes, kVanishes, kCombines };
  struct Action {
    Kind kind;
    const uint8_t *begin, *end;
  };
  Action action(uint32_t code) const {
    const uint32_t packed = pages_[page_of_[code >> 8]][code & 255];
    const uint8_t* bytes = pool_.data() + (packed & 0xFFFFFF);
    return {static_cast<Kind>(packed >> 30), bytes, bytes + (packed >> 24 & 63)};
  }

 private:
  using Bytes = std::vector<uint8_t>;
  class Tables;
  void settle(uint32_t code, const Tables& tables);
  void set(uint32_t code, Kind kind, const Bytes& bytes);
  void append_lower(uint32_t code, const Tables& tables, Bytes& out) const;

  bool clean_, cjk_, strip_, lower_;
  std::array<uint8_t, 128> ascii_{};
  std::array<uint16_t, 0x1100> page_of_{};        // page 0: all 256 characters stay the same
  std::vector<std::array<uint32_t, 256>> pages_;  // kind, size, and where in pool_
  Bytes pool_;
};

class BertCutter final : public Cutter {
 public:
  explicit BertCutter(std::shared_ptr<const BertRules> rules);
  void begin(Text text) override;
  bool next(Words& words) override;

 private:
  void refill();
  void cut();
  uint8_t* normalize(const uint8_t* p, const uint8_t* end, uint8_t* out);
  uint8_t* normalize_beyond_ascii(uint32_t code, const uint8_t* character, uint8_t* out);
  uint8_t* combine(const BertRules::Action& action, uint8_t* out);

  std::shared_ptr<const BertRules> rules_;
  Text text_;
  Window raw_, window_;
  std::vector<uint32_t> starts_, ends_;
  size_t num_starts_ = 0, num_ends_ = 0;
  size_t scanned_ = 0;
  bool last_ = false;
  uint64_t in_word_ = 0, in_mark_ = 0;  // the byte before is of a word, or punctuation

  struct Combining {
    uint8_t combining_class;
    size_t size;
  };
  std::vector<Combining> run_;  // combining characters at the end of what was written
};
