// Any bytes as JSON lines and as documents, through every encoder: nothing may crash, and what comes out is checked
// against slower ways to the same answer. Made for libFuzzer; driver.cpp takes its place where there is none.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "../bert_words.h"
#include "../bpe.h"
#include "../encoder.h"
#include "../unicode.h"
#include "../utf8.h"
#include "../wordpiece.h"

namespace {

using json_lines::Span;
using Bytes = std::vector<uint8_t>;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

Span span_of(const Bytes& bytes) { return {bytes.data(), bytes.data() + bytes.size()}; }

// ---- the patterns, character by character

struct Letter {
  uint32_t code;
  size_t at;  // of its first byte
  uint8_t what;
};

class SlowCutter {
 public:
  SlowCutter(const uint8_t* p, size_t n, Pattern pattern) : n_(n), pattern_(pattern) {
    for (size_t at = 0; at < n;) {
      int length;
      const uint32_t code = utf8::decode(p + at, length);
      letters_.push_back({code, at, unicode::split_classes()[code]});
      at += static_cast<size_t>(length);
    }
  }

  std::vector<uint32_t> starts() const {
    std::vector<uint32_t> found;
    for (size_t i = 0; i < letters_.size();) {
      found.push_back(static_cast<uint32_t>(letters_[i].at));
      const size_t length = pattern_ == Pattern::kGpt2 ? gpt2(i) : cl100k(i);
      require(length > 0, "a pattern that matches nothing");
      i += length;
    }
    return found;
  }

 private:
  uint32_t code(size_t i) const { return i < letters_.size() ? letters_[i].code : 0; }
  bool is(size_t i, uint8_t what) const { return i < letters_.size() && letters_[i].what == what; }
  bool is_line_end(size_t i) const { return code(i) == '\n' || code(i) == '\r'; }
  size_t run(size_t i, uint8_t what) const {
    size_t n = 0;
    while (is(i + n, what)) ++n;
    return n;
  }

  size_t contraction(size_t i, bool fold) const {
    if (code(i) != '\'') return 0;
    const auto at = [&](size_t k) {
      const uint32_t c = code(k);
      if (fold && c == 0x17F) return uint32_t{'s'};
      return fold && c >= 'A' && c <= 'Z' ? c + 32 : c;
    };
    const uint32_t a = at(i + 1), b = at(i + 2);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
  }

  size_t space(size_t i) const {  // \s+(?!\S)|\s+
    const size_t n = run(i, unicode::kSpace);
    return n > 1 && i + n < letters_.size() ? n - 1 : n;
  }

  size_t gpt2(size_t i) const {
    if (const size_t n = contraction(i, false)) return n;
    const size_t blank = code(i) == ' ';
    for (const uint8_t what : {unicode::kLetter, unicode::kNumber, unicode::kOther}) {
      if (const size_t n = run(i + blank, what)) return blank + n;
      if (const size_t n = run(i, what)) return n;
    }
    return space(i);
  }

  size_t cl100k(size_t i) const {
    if (const size_t n = contraction(i, true)) return n;
    if (const size_t n = run(i, unicode::kLetter)) return n;
    if (!is_line_end(i) && !is(i, unicode::kNumber) && run(i + 1, unicode::kLetter)) return 1 + run(i + 1, unicode::kLetter);
    if (const size_t n = run(i, unicode::kNumber)) return n < 3 ? n : 3;
    const size_t blank = code(i) == ' ';
    if (size_t n = run(i + blank, unicode::kOther)) {
      n += blank;
      while (i + n < letters_.size() && is_line_end(i + n)) ++n;
      return n;
    }
    size_t behind = 0;
    for (size_t n = 0; is(i + n, unicode::kSpace); ++n) behind = is_line_end(i + n) ? n + 1 : behind;
    return behind ? behind : space(i);
  }

  size_t n_;
  Pattern pattern_;
  std::vector<Letter> letters_;
};

std::vector<uint32_t> fast_starts(Pattern pattern, Text text) {
  PatternCutter cutter(pattern);
  std::vector<uint32_t> found;
  uint32_t at = 0;
  Words words;
  cutter.begin(text);
  while (cutter.next(words)) {
    for (size_t i = 0; i < words.count; ++i) {
      require(words.ends[i] > words.starts[i], "an empty word");
      found.push_back(at);
      at += words.ends[i] - words.starts[i];
    }
  }
  return found;
}

// ---- the encoders, small ones whose pieces are known

std::string piece_of(uint32_t id) {  // of the BPE below
  static const std::vector<std::string> pieces = [] {
    std::vector<std::string> known;
    for (int byte = 0; byte < 256; ++byte) known.emplace_back(1, static_cast<char>(byte));
    for (const char* piece : {"aa", "aaaa", " a", "th", "the", " the", "\n\n", "  ", "    ", "'s", "\xc3\xa9", "12", "..", "ab"}) {
      known.emplace_back(piece);
    }
    return known;
  }();
  return pieces.at(id);
}

std::unique_ptr<Model> make_bpe(Pattern pattern) {
  std::array<uint32_t, 256> bytes;
  for (uint32_t i = 0; i < 256; ++i) bytes[i] = i;
  const std::vector<Merge> merges = {{'a', 'a', 256}, {256, 256, 257}, {' ', 'a', 258}, {'t', 'h', 259}, {259, 'e', 260},
                                     {' ', 260, 261}, {'\n', '\n', 262}, {' ', ' ', 263}, {263, 263, 264}, {'\'', 's', 265},
                                     {0xC3, 0xA9, 266}, {'1', '2', 267}, {'.', '.', 268}, {'a', 'b', 269}};
  return std::make_unique<Bpe>(pattern, bytes, merges, std::unordered_map<std::string, uint32_t>{});
}

std::unique_ptr<Model> make_wordpiece(bool lower) {
  std::unordered_map<std::string, uint32_t> vocab = {{"[UNK]", 0}, {"the", 1}, {"##s", 2}, {"\xe4\xbd\xa0", 3}};
  for (char c = 'a'; c < 'y'; ++c) {
    vocab[std::string(1, c)] = static_cast<uint32_t>(vocab.size());
    vocab["##" + std::string(1, c)] = static_cast<uint32_t>(vocab.size());
  }
  return std::make_unique<Wordpiece>(std::make_shared<BertRules>(lower, lower, lower, lower), vocab, "[UNK]", "##", 100);
}

struct Encoders {
  Encoder<uint16_t> gpt2{make_bpe(Pattern::kGpt2)};
  Encoder<int32_t> cl100k{make_bpe(Pattern::kCl100k)};
  Encoder<uint16_t> uncased{make_wordpiece(true)};
  Encoder<int32_t> cased{make_wordpiece(false)};
};

// A text as the inside of a JSON string, most of it in escapes.
void write_escaped(const uint8_t* p, const uint8_t* end, Bytes& out) {
  const auto put = [&](const char* text) { out.insert(out.end(), text, text + std::char_traits<char>::length(text)); };
  char unit[8];
  while (p < end) {
    int length;
    uint32_t code = utf8::decode(p, length);
    p += length;
    if (code >= 'a' && code <= 'w') {
      out.push_back(static_cast<uint8_t>(code));
      continue;
    }
    if (code >= 0x10000) {
      std::snprintf(unit, sizeof unit, "\\u%04x", 0xD800 + ((code - 0x10000) >> 10));
      put(unit);
      code = 0xDC00 + ((code - 0x10000) & 0x3FF);
    }
    std::snprintf(unit, sizeof unit, "\\u%04X", code);
    put(unit);
  }
}

template <class Id>
std::vector<Id> ids_of(Encoded<Id>& encoded) {
  const size_t n = encoded.ids.size();
  Id* data = encoded.ids.release();
  std::vector<Id> ids(data, data + n);
  std::free(data);
  return ids;
}

template <class Id>
std::vector<Id> check(Encoder<Id>& encoder, const Bytes& text, const Bytes& line) {
  Encoded<Id> bare, lines;
  encoder.encode_documents({span_of(text)}, Encoder<Id>::kNoEod, bare);
  encoder.encode_jsonl(span_of(line), "text", Encoder<Id>::kNoEod, lines);
  require(bare.bad.empty() && lines.bad.empty(), "a good text was refused");
  require(bare.num_text_bytes == static_cast<int64_t>(text.size()), "bytes of a document");
  require(lines.num_text_bytes == bare.num_text_bytes, "bytes of a line");
  const std::vector<Id> ids = ids_of(bare);
  require(ids == ids_of(lines), "a line's ids are not its text's");
  return ids;
}

template <class Id>
void check_loss(const std::vector<Id>& ids, const Bytes& text) {
  std::string back;
  for (const Id id : ids) back += piece_of(static_cast<uint32_t>(id));
  require(back.size() == text.size() && std::equal(text.begin(), text.end(), back.begin(), [](uint8_t a, char b) {
            return a == static_cast<uint8_t>(b);
          }), "the pieces are not the text");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Encoders encoders;
  const Bytes bytes(data, data + size);  // of exactly this size, so that a read beyond it is seen

  Encoded<uint16_t> out16;
  encoders.gpt2.encode_jsonl(span_of(bytes), "text", 7, out16);
  Encoded<int32_t> out32;
  encoders.cased.encode_jsonl(span_of(bytes), "text", Encoder<int32_t>::kNoEod, out32);
  require(out16.bad == out32.bad && out16.lengths.size() == out32.lengths.size(), "bad lines hang on the encoder");

  if (!utf8::is_valid(bytes.data(), bytes.data() + size)) return 0;
  Bytes line = {'{', '"', 't', 'e', 'x', 't', '"', ':', '"'}, plain;
  write_escaped(bytes.data(), bytes.data() + size, line);
  line.insert(line.end(), {'"', '}', '\n'});
  check_loss(check(encoders.gpt2, bytes, line), bytes);
  check_loss(check(encoders.cl100k, bytes, line), bytes);
  check(encoders.uncased, bytes, line);
  check(encoders.cased, bytes, line);
  for (const Pattern pattern : {Pattern::kGpt2, Pattern::kCl100k}) {
    const Text text(bytes.data(), bytes.data() + size, false);
    require(fast_starts(pattern, text) == SlowCutter(bytes.data(), size, pattern).starts(), "words are cut elsewhere");
  }
  return 0;
}
