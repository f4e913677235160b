// GPT-2's and cl100k's patterns without a regular expression: 64 bytes become masks of letters, numbers, white space
// and the rest, and bit operations find where the pattern's matches begin.
//
//   GPT-2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   cl100k   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|
//            \s+(?!\S)|\s+
//
// A mask's lowest bit is the block's first byte. A character of several bytes sets as many bits; blocks end between
// characters. `x << 1 | carry` is "the byte before is an x". Adding a bit to a mask runs through the ones above it:
// (mask + bit) & ~mask is where a run that begins at bit ends.

#include <algorithm>

#include "simd.h"
#include "unicode.h"
#include "utf8.h"
#include "words.h"

namespace {

constexpr size_t kBlock = 64;
constexpr size_t kAhead = 8;  // bytes that must be there beyond a block: a character, a contraction

uint64_t below(size_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }
uint64_t bit(size_t i) { return uint64_t{1} << i; }
size_t lowest(uint64_t mask) { return static_cast<size_t>(__builtin_ctzll(mask)); }
// The compiler's own calls a function where there is no instruction for it.
int count_bits(uint64_t x) {
  x -= x >> 1 & 0x5555555555555555u;
  x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
  return static_cast<int>(((x + (x >> 4)) & 0x0F0F0F0F0F0F0F0Fu) * 0x0101010101010101u >> 56);
}
size_t highest(uint64_t mask) { return 63 - static_cast<size_t>(__builtin_clzll(mask)); }

// The masks of 64 bytes as if all were ASCII; `high` are those that are not.
struct Ascii {
  uint64_t high = 0, letter = 0, number = 0, space = 0, blank = 0, newline = 0, quote = 0;
};

#ifdef LMTRAIN_SSE2
__m128i between(__m128i v, char low, char width) {  // low <= v <= low + width, bytewise
  const __m128i x = _mm_sub_epi8(v, _mm_set1_epi8(low));
  return _mm_cmpeq_epi8(_mm_min_epu8(x, _mm_set1_epi8(width)), x);
}

uint64_t bits(__m128i v, int at) { return static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(v))) << at; }

Ascii look(const uint8_t* p) {
  Ascii a;
  for (int at = 0; at < 64; at += 16) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + at));
    const __m128i blank = _mm_cmpeq_epi8(v, _mm_set1_epi8(' '));
    a.high |= bits(v, at);
    a.letter |= bits(between(_mm_or_si128(v, _mm_set1_epi8(0x20)), 'a', 25), at);
    a.number |= bits(between(v, '0', 9), at);
    a.blank |= bits(blank, at);
    a.space |= bits(_mm_or_si128(blank, between(v, '\t', 4)), at);
    a.newline |= bits(_mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('\n')), _mm_cmpeq_epi8(v, _mm_set1_epi8('\r'))), at);
    a.quote |= bits(_mm_cmpeq_epi8(v, _mm_set1_epi8('\'')), at);
  }
  return a;
}
#else
Ascii look(const uint8_t* p) {
  Ascii a;
  for (int at = 0; at < 64; ++at) {
    const uint8_t c = p[at], lower = c | 0x20;
    a.high |= static_cast<uint64_t>(c >= 0x80) << at;
    a.letter |= static_cast<uint64_t>(lower >= 'a' && lower <= 'z') << at;
    a.number |= static_cast<uint64_t>(c >= '0' && c <= '9') << at;
    a.blank |= static_cast<uint64_t>(c == ' ') << at;
    a.space |= static_cast<uint64_t>(c == ' ' || (c >= '\t' && c <= '\r')) << at;
    a.newline |= static_cast<uint64_t>(c == '\n' || c == '\r') << at;
    a.quote |= static_cast<uint64_t>(c == '\'') << at;
  }
  return a;
}
#endif

// The length of the contraction at p, which holds an apostrophe; 0 if there is none. 'S, and 'ſ, count only with case folded.
int contraction(const uint8_t* p, bool folded) {
  if (folded && p[1] == 0xC5 && p[2] == 0xBF) return 3;
  const uint8_t fold = folded ? 0x20 : 0;
  const auto at = [&](int i) { return (p[i] >= 'A' && p[i] <= 'Z') ? p[i] | fold : p[i]; };
  const int first = at(1);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  const int second = at(2);
  return ((first == 'r' || first == 'v') && second == 'e') || (first == 'l' && second == 'l') ? 3 : 0;
}

}  // namespace

struct PatternCutter::Block {
  const uint8_t* p = nullptr;
  size_t n = 0;  // bytes; at most 64
  uint64_t letter = 0, number = 0, space = 0, other = 0;
  uint64_t blank = 0, newline = 0, quote = 0;
  uint64_t lead = 0;        // first bytes of characters
  uint64_t wide_space = 0;  // first bytes of white space beyond ASCII
  bool space_next = false;   // white space, or the end of the text, is right behind the block
};

PatternCutter::PatternCutter(Pattern pattern)
    : pattern_(pattern), classes_(unicode::split_classes()), starts_(kMostWords + kBlock + 16) {}

void PatternCutter::begin(Text text) {
  text_ = text;
  last_ = text.is_padded();
  if (last_) window_.show(text.data(), text.most_bytes());
  else window_.clear();
  num_starts_ = handed_out_ = scanned_ = 0;
  num_text_bytes_ = window_.size();
  carry_ = Carry{};
}

bool PatternCutter::next(Words& words) {
  std::copy(starts_.begin() + handed_out_, starts_.begin() + num_starts_, starts_.begin());
  num_starts_ -= handed_out_;
  handed_out_ = 0;
  // A word ends where the next begins; the start of a gap may yet be taken back.
  while (!at_end() && num_starts_ <= 1 + carry_.tail) {
    if (!cut() && !last_) refill();
  }
  size_t count = at_end() ? num_starts_ : num_starts_ - 1 - carry_.tail;
  if (at_end()) starts_[num_starts_] = static_cast<uint32_t>(window_.size());
  handed_out_ = count;
  words = {window_.data(), starts_.data(), starts_.data() + 1, count};
  return count > 0;
}

// Drops what was handed out and reads on.
void PatternCutter::refill() {
  const uint32_t kept = num_starts_ ? starts_[0] : static_cast<uint32_t>(scanned_);
  window_.drop(kept);
  scanned_ -= kept;
  for (size_t i = 0; i < num_starts_; ++i) starts_[i] -= kept;
  uint8_t* out = window_.reserve(kPortionBytes + Text::kSlack);
  const size_t n = text_.read(out, kPortionBytes);
  num_text_bytes_ += n;
  window_.grow(n);
  window_.pad();
  last_ = text_.done();
}

bool PatternCutter::cut() { return pattern_ == Pattern::kGpt2 ? cut_as<Pattern::kGpt2>() : cut_as<Pattern::kCl100k>(); }

// Goes through the window's blocks until there is a good number of words; false if not one block could be looked at.
template <Pattern P>
bool PatternCutter::cut_as() {
  const size_t size = window_.size();
  uint32_t* out = starts_.data() + num_starts_;
  const uint32_t* const full = starts_.data() + kMostWords;
  bool any = false;
  while (out < full && scanned_ < size && (last_ || size - scanned_ >= kBlock + kAhead)) {
    Block block;
    block.p = window_.data() + scanned_;
    block.n = std::min(size - scanned_, kBlock);
    classify(block);
    block.space_next = scanned_ + block.n == size || class_at(block.p + block.n) == unicode::kSpace;

    uint64_t starts;
    if (P == Pattern::kGpt2) {
      starts = gpt2_starts(block);
    } else {
      num_starts_ = static_cast<size_t>(out - starts_.data());
      starts = cl100k_starts(block);
      out = starts_.data() + num_starts_;  // it may have taken one back
    }
    const auto base = static_cast<uint32_t>(scanned_);
    const int count = count_bits(starts);
    for (uint32_t* w = out; starts; w += 4) {  // four at a time, some of them too many
      for (int i = 0; i < 4; ++i) {
        w[i] = base + static_cast<uint32_t>(__builtin_ctzll(starts | bit(63)));
        starts &= starts - 1;
      }
    }
    out += count;
    scanned_ += block.n;
    any = true;
  }
  num_starts_ = static_cast<size_t>(out - starts_.data());
  return any;
}

uint8_t PatternCutter::class_at(const uint8_t* p) const {
  int length;
  return classes_[utf8::decode(p, length)];
}

void PatternCutter::classify(Block& block) const {
  const Ascii a = look(block.p);
  uint64_t valid = below(block.n);
  uint64_t high = a.high & valid;
  block.letter = a.letter & ~high;
  block.number = a.number & ~high;
  block.space = a.space & ~high;
  block.lead = ~high;
  while (high) {
    const size_t at = lowest(high);
    const auto length = static_cast<size_t>(utf8::length(block.p[at]));
    if (at + length > block.n) {  // it belongs to the next block
      block.n = at;
      valid = below(at);
      break;
    }
    const uint8_t what = class_at(block.p + at);
    const uint64_t mask = below(length) << at;
    block.lead |= bit(at);
    if (what == unicode::kLetter) block.letter |= mask;
    if (what == unicode::kNumber) block.number |= mask;
    if (what == unicode::kSpace) {
      block.space |= mask;
      block.wide_space |= bit(at);
    }
    high &= ~mask;
  }
  block.letter &= valid;
  block.number &= valid;
  block.space &= valid;
  block.lead &= valid;
  block.blank = a.blank & valid;
  block.newline = a.newline & valid;
  block.quote = a.quote & valid;
  block.other = valid & ~(block.letter | block.number | block.space);
}

namespace {

// Marks stand on the last byte of a character; for white space of several bytes they belong on its first.
uint64_t onto_first_bytes(uint64_t marks, uint64_t wide, const uint8_t* p) {
  for (; wide; wide &= wide - 1) {
    const size_t at = lowest(wide), last = at + static_cast<size_t>(utf8::length(p[at])) - 1;
    if (marks >> last & 1) marks = (marks & ~bit(last)) | bit(at);
  }
  return marks;
}

}  // namespace

// A space goes with what follows it; of other white space the last character stands alone before something else.
uint64_t PatternCutter::gpt2_starts(const Block& b) {
  const size_t top = b.n - 1;
  const uint64_t after_space = b.space << 1 | carry_.space;
  const uint64_t before_space = b.space >> 1 | uint64_t{b.space_next} << top;
  uint64_t ends_gap = b.space & ~before_space;
  if (b.wide_space) ends_gap = onto_first_bytes(ends_gap, b.wide_space, b.p);
  const uint64_t runs = (b.letter & ~(b.letter << 1 | carry_.letter)) | (b.number & ~(b.number << 1 | carry_.number)) |
                        (b.other & ~(b.other << 1 | carry_.other));
  const uint64_t starts = (b.space & ~after_space) | ends_gap | (runs & ~(b.blank << 1 | carry_.blank));
  carry_.letter = b.letter >> top & 1;
  carry_.number = b.number >> top & 1;
  carry_.space = b.space >> top & 1;
  carry_.other = b.other >> top & 1;
  carry_.blank = b.blank >> top & 1;
  return apply_contractions<Pattern::kGpt2>(b, starts, starts & b.quote);
}

// One character, if it is neither a line's end nor a number, goes with the letters behind it. Line ends go with what is
// neither letter, number nor space before them, or else with the white space before them.
uint64_t PatternCutter::cl100k_starts(const Block& b) {
  const size_t top = b.n - 1;
  const uint64_t after_other = b.other << 1 | carry_.other;

  // Line ends right behind punctuation are taken by it; white space begins behind them.
  const uint64_t first_taken = b.newline & (after_other | carry_.taken);
  const uint64_t taken = ((b.newline + first_taken) ^ b.newline) & b.newline;
  const uint64_t space = b.space & ~taken, newline = b.newline & ~taken, gap = space & ~newline;

  // White space is one word up to its last line end. The gap behind that is another, but for its last character.
  const uint64_t before_space = b.space >> 1 | uint64_t{b.space_next} << top;
  uint64_t ends_gap = gap & ~before_space;
  if (b.wide_space) ends_gap = onto_first_bytes(ends_gap, b.wide_space, b.p);
  uint64_t tails = gap & (newline << 1 | carry_.newline);
  const uint64_t open = tails | (gap & carry_.tail);  // lowest bits of gaps behind line ends
  const uint64_t closed = ((gap + open) & ~gap) | (carry_.tail & ~gap & 1);
  for (uint64_t wrong = closed & newline; wrong; wrong &= wrong - 1) {  // another line end follows: no word of its own
    const uint64_t before = tails & below(lowest(wrong));
    if (before) tails &= ~bit(highest(before));
    else --num_starts_;  // it began in a block before, and nothing since
  }
  const uint64_t space_starts = (space & ~(space << 1 | carry_.space)) | tails | ends_gap;

  // Punctuation, unless a space before takes it; letters, unless a gap's last or a lone punctuation character does.
  const uint64_t others = b.other & ~after_other & ~(b.blank << 1 | carry_.blank);
  const uint64_t rest = b.other & ~b.lead;  // bytes of a character behind its first
  const uint64_t behind_first = ((others << 1 | carry_.lone) + rest) & ~rest;
  const uint64_t letters = b.letter & ~(b.letter << 1 | carry_.letter) & ~(behind_first | gap << 1 | carry_.gap);
  const uint64_t starts = space_starts | others | letters | thirds(b);

  carry_.lone = others >> highest(b.lead) & 1;
  carry_.tail = ((gap + open) ^ gap) >> top & gap >> top & 1;
  carry_.taken = taken >> top & 1;
  carry_.newline = newline >> top & 1;
  carry_.gap = gap >> top & 1;
  carry_.letter = b.letter >> top & 1;
  carry_.space = space >> top & 1;
  carry_.other = b.other >> top & 1;
  carry_.blank = b.blank >> top & 1;
  return apply_contractions<Pattern::kCl100k>(b, starts, others & b.quote);
}

// Where numbers begin that have at most three digits.
uint64_t PatternCutter::thirds(const Block& b) {
  if (!b.number) {
    carry_.digits = 0;
    return 0;
  }
  uint64_t starts = 0;
  const uint64_t after_number = b.number << 1 | uint64_t{carry_.digits > 0};
  int digits = carry_.digits;
  for (uint64_t left = b.number & b.lead; left; left &= left - 1) {
    const size_t at = lowest(left);
    if (!(after_number >> at & 1)) digits = 0;
    if (digits % 3 == 0) starts |= bit(at);
    digits = digits % 3 + 1;
  }
  carry_.digits = b.number >> (b.n - 1) & 1 ? digits : 0;
  return starts;
}

// An apostrophe where a word begins, with one or two letters behind it, is a word of its own.
template <Pattern P>
uint64_t PatternCutter::apply_contractions(const Block& b, uint64_t starts, uint64_t candidates) {
  starts = (starts & ~carry_.clear) | carry_.set;
  carry_.clear = carry_.set = 0;
  for (; candidates; candidates &= candidates - 1) {
    const size_t at = lowest(candidates);
    const auto length = static_cast<size_t>(contraction(b.p + at, P == Pattern::kCl100k));
    if (length == 0) continue;
    const size_t inside = at + 1, behind = at + length;
    if (inside < b.n) starts &= ~bit(inside);
    else carry_.clear |= bit(inside - b.n);
    if (behind < b.n) starts |= bit(behind);
    else carry_.set |= bit(behind - b.n);
  }
  return starts & below(b.n);
}
