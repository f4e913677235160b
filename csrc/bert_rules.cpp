// BertRules: the steps of BERT's normalizer and pre-tokenizer, applied to every character in advance.

#include <iterator>
#include <stdexcept>
#include <unordered_map>

#include "bert_words.h"
#include "unicode.h"
#include "unicode_tables.h"
#include "utf8.h"

namespace {

enum Flag : uint8_t { kDropped = 1, kBlank = 2, kCjk = 4, kPunctuation = 8, kAccent = 16, kMoves = 32 };
constexpr uint32_t kHangulFirst = 0xAC00, kHangulLast = 0xD7A3, kCapitalDottedI = 0x130;

void append(std::vector<uint8_t>& out, uint32_t code) {
  uint8_t bytes[4];
  out.insert(out.end(), bytes, utf8::append(bytes, code));
}

}  // namespace

// The generated tables, spread so that a code point finds its row.
class BertRules::Tables {
 public:
  Tables() : flags_(unicode::kNumCodes) {
    using namespace unicode;
    for (size_t i = 0; i < std::size(kBertFlags); ++i) {
      const uint32_t stop = i + 1 < std::size(kBertFlags) ? kBertFlags[i + 1].first : kNumCodes;
      for (uint32_t code = kBertFlags[i].first; code < stop; ++code) flags_[code] = kBertFlags[i].value;
    }
    for (const uint32_t* row = kStripped; row < std::end(kStripped); row += 2 + row[1]) stripped_[row[0]] = row + 1;
    for (const Shift& s : kShifts) {
      for (uint32_t code = s.first; code <= s.last; code += s.step) lower_[code] = code + static_cast<uint32_t>(s.delta);
    }
    for (const Run& r : kCombining) combining_[r.first] = r.value;
  }

  uint8_t flags(uint32_t code) const { return flags_[code]; }
  uint8_t combining_class(uint32_t code) const { return find(combining_, code, uint8_t{0}); }
  uint32_t lower(uint32_t code) const { return find(lower_, code, code); }

  // Whether it stays itself in every step, so that nothing needs to be noted.
  bool is_plain(uint32_t code) const {
    return flags_[code] == 0 && !stripped_.count(code) && !lower_.count(code) && code != kCapitalDottedI &&
           (code < kHangulFirst || code > kHangulLast);
  }

  // The characters it is composed of, without accents.
  std::vector<uint32_t> stripped(uint32_t code) const {
    if (code >= kHangulFirst && code <= kHangulLast) {  // Unicode 3.12: a leading, a vowel and perhaps a trailing sign
      const uint32_t index = code - kHangulFirst, trailing = index % 28;
      std::vector<uint32_t> parts = {0x1100 + index / 588, 0x1161 + index % 588 / 28};
      if (trailing) parts.push_back(0x11A7 + trailing);
      return parts;
    }
    if (flags_[code] & kAccent) return {};
    const auto found = stripped_.find(code);
    if (found == stripped_.end()) return {code};
    return {found->second + 1, found->second + 1 + found->second[0]};
  }

 private:
  template <class Value>
  static Value find(const std::unordered_map<uint32_t, Value>& map, uint32_t code, Value otherwise) {
    const auto found = map.find(code);
    return found == map.end() ? otherwise : found->second;
  }

  std::vector<uint8_t> flags_;
  std::unordered_map<uint32_t, const uint32_t*> stripped_;
  std::unordered_map<uint32_t, uint32_t> lower_;
  std::unordered_map<uint32_t, uint8_t> combining_;
};

BertRules::BertRules(bool clean, bool cjk, bool strip, bool lower)
    : clean_(clean), cjk_(cjk), strip_(strip), lower_(lower), pages_(1) {
  const Tables tables;
  for (uint32_t c = 0; c < 128; ++c) {
    const bool upper = c >= 'A' && c <= 'Z';
    ascii_[c] = static_cast<uint8_t>(lower && upper ? c | 0x20 : c);
    if (tables.flags(c) & kBlank) ascii_[c] = ' ';
    if (clean && tables.flags(c) & kDropped) ascii_[c] = kGone;
  }
  for (uint32_t code = 128; code < unicode::kNumCodes; ++code) {
    if (!tables.is_plain(code)) settle(code, tables);
  }
}

void BertRules::settle(uint32_t code, const Tables& tables) {
  const uint8_t flags = tables.flags(code);
  if (clean_ && flags & kDropped) return set(code, kVanishes, {});
  if (strip_ && flags & kAccent) return set(code, flags & kMoves ? kVanishes : kBecomes, {});
  const std::vector<uint32_t> parts = strip_ ? tables.stripped(code) : std::vector<uint32_t>{code};
  const bool alone = cjk_ && flags & kCjk;
  bool combines = false;
  Bytes whole, in_parts;
  if (alone) whole.push_back(' ');
  for (const uint32_t part : parts) {
    Bytes bytes;
    append_lower(part, tables, bytes);
    const uint8_t combining_class = strip_ ? tables.combining_class(part) : 0;
    combines |= combining_class != 0;
    in_parts.push_back(combining_class);
    in_parts.push_back(static_cast<uint8_t>(bytes.size()));
    in_parts.insert(in_parts.end(), bytes.begin(), bytes.end());
    whole.insert(whole.end(), bytes.begin(), bytes.end());
  }
  if (alone) whole.push_back(' ');
  Bytes itself;
  append(itself, code);
  if (whole.size() > kMostGrowth * itself.size()) throw std::logic_error("a character grows too much");
  if (combines) set(code, kCombines, in_parts);
  else if (whole != itself) set(code, kBecomes, whole);
}

void BertRules::append_lower(uint32_t code, const Tables& tables, Bytes& out) const {
  if (lower_ && code == kCapitalDottedI) {
    append(out, 'i');
    append(out, 0x307);
    return;
  }
  code = lower_ ? tables.lower(code) : code;
  if (tables.flags(code) & kBlank) {
    out.push_back(' ');
  } else if (code >= 128 && tables.flags(code) & kPunctuation) {  // the cutter knows that of ASCII
    out.push_back(' ');
    append(out, code);
    out.push_back(' ');
  } else {
    append(out, code);
  }
}

void BertRules::set(uint32_t code, Kind kind, const Bytes& bytes) {
  uint16_t& page = page_of_[code >> 8];
  if (page == 0) {
    page = static_cast<uint16_t>(pages_.size());
    pages_.emplace_back();
  }
  if (bytes.size() > 63 || pool_.size() >> 24) throw std::logic_error("the rules do not fit");
  pages_[page][code & 255] = kind << 30 | static_cast<uint32_t>(bytes.size()) << 24 | static_cast<uint32_t>(pool_.size());
  pool_.insert(pool_.end(), bytes.begin(), bytes.end());
}
