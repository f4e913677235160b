#include "bert_words.h"

#include <algorithm>
#include <cstring>

#include "simd.h"
#include "utf8.h"

namespace {

constexpr size_t kBlock = 64;
constexpr size_t kRawBytes = Cutter::kPortionBytes / 4;

uint64_t below(size_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

// Of 64 bytes of normalized text: which are spaces, and which are ASCII's punctuation.
struct Marks {
  uint64_t space = 0, punctuation = 0;
};

#ifdef LMTRAIN_SSE2
__m128i between(__m128i v, char low, char high) {
  const __m128i x = _mm_sub_epi8(v, _mm_set1_epi8(low));
  return _mm_cmpeq_epi8(_mm_min_epu8(x, _mm_set1_epi8(static_cast<char>(high - low))), x);
}

Marks look(const uint8_t* p) {
  Marks m;
  for (int at = 0; at < 64; at += 16) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + at));
    const __m128i marks = _mm_or_si128(_mm_or_si128(between(v, '!', '/'), between(v, ':', '@')),
                                       _mm_or_si128(between(v, '[', '`'), between(v, '{', '~')));
    const __m128i space = _mm_cmpeq_epi8(v, _mm_set1_epi8(' '));
    m.space |= static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(space))) << at;
    m.punctuation |= static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(marks))) << at;
  }
  return m;
}

// Copies plain ASCII in lower case, or as it is, with blanks for the ends of lines and tabs; returns how many bytes.
// Up to 15 more may be written behind them.
size_t copy_plain(uint8_t* out, const uint8_t* p, const uint8_t* end, bool lower) {
  const uint8_t* const begin = p;
  const __m128i case_bit = _mm_set1_epi8(lower ? 0x20 : 0), blank = _mm_set1_epi8(' ');
  for (; end - p >= 16; p += 16, out += 16) {
    __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i gap = _mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('\n')),
                                     _mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('\t')),
                                                  _mm_cmpeq_epi8(v, _mm_set1_epi8('\r'))));
    v = _mm_or_si128(_mm_andnot_si128(gap, v), _mm_and_si128(gap, blank));
    const __m128i strange = _mm_or_si128(_mm_cmplt_epi8(v, blank), _mm_cmpeq_epi8(v, _mm_set1_epi8(0x7F)));
    v = _mm_or_si128(v, _mm_and_si128(between(v, 'A', 'Z'), case_bit));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), v);
    if (const int mask = _mm_movemask_epi8(strange)) {
      return static_cast<size_t>(p - begin) + static_cast<size_t>(__builtin_ctz(static_cast<unsigned>(mask)));
    }
  }
  return static_cast<size_t>(p - begin);
}
#else
Marks look(const uint8_t* p) {
  Marks m;
  for (int at = 0; at < 64; ++at) {
    const uint8_t c = p[at];
    const bool mark = (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
    m.space |= static_cast<uint64_t>(c == ' ') << at;
    m.punctuation |= static_cast<uint64_t>(mark) << at;
  }
  return m;
}

size_t copy_plain(uint8_t*, const uint8_t*, const uint8_t*, bool) { return 0; }
#endif

// Writes where the bits of a mask stand, and some more behind; returns the end of those that do.
uint32_t* write_bits(uint64_t mask, uint32_t base, uint32_t* out) {
  uint32_t* const end = out + __builtin_popcountll(mask);
  for (; mask; out += 4) {
    for (int i = 0; i < 4; ++i) {
      out[i] = base + static_cast<uint32_t>(__builtin_ctzll(mask | uint64_t{1} << 63));
      mask &= mask - 1;
    }
  }
  return end;
}

}  // namespace

BertCutter::BertCutter(std::shared_ptr<const BertRules> rules)
    : rules_(std::move(rules)), starts_(kMostWords + kBlock + 16), ends_(kMostWords + kBlock + 16) {}

void BertCutter::begin(Text text) {
  text_ = text;
  raw_.clear();
  window_.clear();
  num_starts_ = num_ends_ = scanned_ = num_text_bytes_ = 0;
  last_ = false;
  in_word_ = in_mark_ = 0;
  run_.clear();
}

bool BertCutter::next(Words& words) {
  if (num_starts_ > num_ends_) starts_[0] = starts_[num_ends_];  // a word whose end was not seen
  num_starts_ -= num_ends_;
  num_ends_ = 0;
  while (num_ends_ == 0 && !(last_ && scanned_ == window_.size())) {
    if (scanned_ == window_.size()) refill();
    cut();
  }
  words = {window_.data(), starts_.data(), ends_.data(), num_ends_};
  return num_ends_ > 0;
}

// Drops what was handed out, reads on and normalizes, up to a byte of ASCII: what stands before it no longer changes.
void BertCutter::refill() {
  const uint32_t kept = num_starts_ ? starts_[0] : static_cast<uint32_t>(scanned_);
  window_.drop(kept);
  scanned_ -= kept;
  if (num_starts_) starts_[0] = 0;

  const size_t n = text_.read(raw_.reserve(kRawBytes + Text::kSlack), kRawBytes);
  num_text_bytes_ += n;
  raw_.grow(n);
  last_ = text_.done();
  size_t ready = raw_.size();
  while (!last_ && ready > 0 && raw_.data()[ready - 1] >= 0x80) --ready;
  uint8_t* out = window_.reserve(BertRules::kMostGrowth * ready + kBlock);
  uint8_t* end = normalize(raw_.data(), raw_.data() + ready, out);
  if (last_) *end++ = ' ';  // so that the last word ends
  window_.grow(static_cast<size_t>(end - out));
  window_.pad();
  raw_.drop(ready);
}

uint8_t* BertCutter::normalize(const uint8_t* p, const uint8_t* end, uint8_t* out) {
  while (p < end) {
    const size_t n = copy_plain(out, p, end, rules_->lower());
    if (n) run_.clear();
    p += n;
    out += n;
    if (p == end) break;
    if (*p >= 0x80) {
      int length;
      const uint32_t code = utf8::decode(p, length);
      out = normalize_beyond_ascii(code, p, out);
      p += length;
    } else {
      const uint8_t c = rules_->ascii(*p++);
      if (c != BertRules::kGone) {
        *out++ = c;
        run_.clear();
      }
    }
  }
  return out;
}

uint8_t* BertCutter::normalize_beyond_ascii(uint32_t code, const uint8_t* character, uint8_t* out) {
  const BertRules::Action action = rules_->action(code);
  switch (action.kind) {
    case BertRules::kVanishes: return out;
    case BertRules::kCombines: return combine(action, out);
    case BertRules::kBecomes:
      run_.clear();
      return std::copy(action.begin, action.end, out);
    default:
      run_.clear();
      return std::copy(character, character + utf8::length(*character), out);
  }
}

// Combining characters between two others stand in the order of their classes (Unicode 3.11), even though the accents
// among them are gone.
uint8_t* BertCutter::combine(const BertRules::Action& action, uint8_t* out) {
  for (const uint8_t* part = action.begin; part < action.end; part += 2 + part[1]) {
    const uint8_t combining_class = part[0];
    const size_t size = part[1];
    if (combining_class == 0) run_.clear();
    size_t at = run_.size(), moved = 0;
    while (at > 0 && run_[at - 1].combining_class > combining_class) moved += run_[--at].size;
    std::memmove(out - moved + size, out - moved, moved);
    std::memcpy(out - moved, part + 2, size);
    out += size;
    if (combining_class) run_.insert(run_.begin() + static_cast<ptrdiff_t>(at), {combining_class, size});
  }
  return out;
}

// Goes through the window's blocks until there is a good number of words.
void BertCutter::cut() {
  uint32_t* starts = starts_.data() + num_starts_;
  uint32_t* ends = ends_.data() + num_ends_;
  const uint32_t* const full = starts_.data() + kMostWords;
  while (starts < full && scanned_ < window_.size()) {
    const size_t n = std::min(window_.size() - scanned_, kBlock), top = n - 1;
    const Marks marks = look(window_.data() + scanned_);
    const uint64_t mark = marks.punctuation & below(n), word = below(n) & ~(marks.space | marks.punctuation);
    const uint64_t after_word = word << 1 | in_word_, after_mark = mark << 1 | in_mark_;
    const auto base = static_cast<uint32_t>(scanned_);
    starts = write_bits((word & ~after_word) | mark, base, starts);
    ends = write_bits(((after_word & ~word) | after_mark) & below(n), base, ends);
    in_word_ = word >> top & 1;
    in_mark_ = mark >> top & 1;
    scanned_ += n;
  }
  num_starts_ = static_cast<size_t>(starts - starts_.data());
  num_ends_ = static_cast<size_t>(ends - ends_.data());
}
