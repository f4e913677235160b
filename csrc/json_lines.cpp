#include "json_lines.h"

#include <array>
#include <cstring>
#include <string>

#include "simd.h"
#include "utf8.h"
#include "words.h"

namespace json_lines {

namespace {

int hex_digit(uint8_t c) {
  if (c >= '0' && c <= '9') return c - '0';
  const uint8_t lower = c | 0x20;
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

// The four hexadecimal digits at p, or -1.
int hex4(const uint8_t* p) {
  int value = 0;
  for (int i = 0; i < 4; ++i) {
    const int digit = hex_digit(p[i]);
    if (digit < 0) return -1;
    value = value << 4 | digit;
  }
  return value;
}

bool is_high(int code) { return code >= 0xD800 && code < 0xDC00; }
bool is_low(int code) { return code >= 0xDC00 && code < 0xE000; }

// The character of the escape at p (p[1] is 'u'); p moves behind it, or behind both halves of a surrogate pair.
uint32_t read_unicode(const uint8_t*& p, const uint8_t* end) {
  const int code = hex4(p + 2);
  p += 6;
  if (is_high(code) && end - p >= 6 && p[0] == '\\' && p[1] == 'u') {
    const int low = hex4(p + 2);
    if (is_low(low)) {
      p += 6;
      return 0x10000u + (static_cast<uint32_t>(code - 0xD800) << 10) + static_cast<uint32_t>(low - 0xDC00);
    }
  }
  return static_cast<uint32_t>(code);
}

// What \c stands for; 0 if nothing.
constexpr std::array<uint8_t, 256> short_escapes() {
  std::array<uint8_t, 256> table{};
  table['"'] = '"';
  table['\\'] = '\\';
  table['/'] = '/';
  table['b'] = '\b';
  table['f'] = '\f';
  table['n'] = '\n';
  table['r'] = '\r';
  table['t'] = '\t';
  return table;
}
constexpr std::array<uint8_t, 256> kShortEscapes = short_escapes();

struct String {
  const uint8_t *begin = nullptr, *end = nullptr;
  bool escaped = false;
  bool lone = false;  // holds half of a surrogate pair
};

// Strict JSON, as Python's json module reads it.
class Scanner {
 public:
  explicit Scanner(Span line) : p_(line.begin), end_(line.end) {}

  // `out`, if any, receives the text that is found, and is moved behind it; there is room for all of the line.
  bool top_object(std::string_view key, String& found, uint8_t*& out) {
    skip_space();
    if (p_ == end_ || *p_ != '{') return false;
    bool seen = false, good = true;
    const bool whole = members([&](const String& name) {
      if (!is_key(name, key)) return value(1);
      good = !seen && p_ < end_ && *p_ == '"';
      seen = true;
      return good && (out ? copy_string(found, out) : string(found));
    });
    skip_space();
    return whole && seen && good && p_ == end_ && !found.lone;
  }

  bool saw_high_bits() const { return high_; }

 private:
  void skip_space() {
    while (p_ < end_ && (*p_ == ' ' || *p_ == '\t' || *p_ == '\r' || *p_ == '\n')) ++p_;
  }

  bool take(uint8_t c) {
    skip_space();
    if (p_ == end_ || *p_ != c) return false;
    ++p_;
    return true;
  }

  // The inside of an object; `on_value` is called where a value begins, with the name before it.
  template <class OnValue>
  bool members(OnValue on_value) {
    ++p_;
    if (take('}')) return true;
    do {
      skip_space();
      String name;
      if (p_ == end_ || *p_ != '"' || !string(name) || !take(':')) return false;
      skip_space();
      if (!on_value(name)) return false;
    } while (take(','));
    return take('}');
  }

  bool elements(int depth) {
    ++p_;
    if (take(']')) return true;
    do {
      skip_space();
      if (!value(depth)) return false;
    } while (take(','));
    return take(']');
  }

  bool value(int depth) {  // inside so many brackets
    if (p_ == end_) return false;
    switch (*p_) {
      case '"': { String s; return string(s); }
      case '{': return depth < kMaxDepth && members([&](const String&) { return value(depth + 1); });
      case '[': return depth < kMaxDepth && elements(depth + 1);
      case 't': return word("true");
      case 'f': return word("false");
      case 'n': return word("null");
      default: return number();
    }
  }

  bool word(std::string_view w) {
    if (static_cast<size_t>(end_ - p_) < w.size() || std::memcmp(p_, w.data(), w.size()) != 0) return false;
    p_ += w.size();
    return true;
  }

  ptrdiff_t digits() {
    const uint8_t* begin = p_;
    while (p_ < end_ && *p_ >= '0' && *p_ <= '9') ++p_;
    return p_ - begin;
  }

  bool number() {
    if (p_ < end_ && *p_ == '-') ++p_;
    const bool zero = p_ < end_ && *p_ == '0';
    const ptrdiff_t whole = zero ? (++p_, 1) : digits();
    if (whole == 0) return false;
    bool real = false;
    if (p_ < end_ && *p_ == '.') {
      ++p_;
      real = true;
      if (digits() == 0) return false;
    }
    if (p_ < end_ && (*p_ == 'e' || *p_ == 'E')) {
      ++p_;
      real = true;
      if (p_ < end_ && (*p_ == '+' || *p_ == '-')) ++p_;
      if (digits() == 0) return false;
    }
    return real || whole <= kMaxDigits;
  }

  bool string(String& s) {
    s = String{};
    s.begin = ++p_;
    for (;;) {
      p_ += simd::length_until<simd::Special>(p_, end_, high_);
      if (p_ == end_) return false;
      if (*p_ == '"') {
        s.end = p_++;
        return true;
      }
      uint32_t code;
      if (!escape(s, code)) return false;
    }
  }

  bool copy_string(String& s, uint8_t*& out) {
    s = String{};
    s.begin = ++p_;
    for (;;) {
      const size_t n = simd::copy_until<simd::Special>(out, p_, end_, high_);
      p_ += n;
      out += n;
      if (p_ == end_) return false;
      if (*p_ == '"') {
        s.end = p_++;
        return true;
      }
      uint32_t code;
      if (!escape(s, code)) return false;
      out = utf8::append(out, code);
    }
  }

  // Passes the escape at p_; false if it is a control character or no escape.
  bool escape(String& s, uint32_t& code) {
    s.escaped = true;
    if (*p_ != '\\' || end_ - p_ < 2) return false;
    code = kShortEscapes[p_[1]];
    if (code) {
      p_ += 2;
      return true;
    }
    if (p_[1] != 'u' || end_ - p_ < 6 || hex4(p_ + 2) < 0) return false;
    code = read_unicode(p_, end_);
    s.lone |= code >= 0xD800 && code < 0xE000;
    return true;
  }

  static bool is_key(const String& name, std::string_view key) {
    const auto size = static_cast<size_t>(name.end - name.begin);
    if (!name.escaped) return size == key.size() && std::memcmp(name.begin, key.data(), size) == 0;
    std::string plain(size + Text::kMinRoom + Text::kSlack, '\0');
    plain.resize(Text(name.begin, name.end, true).read(reinterpret_cast<uint8_t*>(plain.data()), size + Text::kMinRoom));
    return plain == key;
  }

  const uint8_t *p_, *end_;
  bool high_ = false;
};

bool is_space(uint8_t c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

}  // namespace

bool next_line(const uint8_t*& p, const uint8_t* end, Span& line) {
  while (p < end) {
    const void* found = std::memchr(p, '\n', static_cast<size_t>(end - p));
    line = {p, found ? static_cast<const uint8_t*>(found) : end};
    p = found ? line.end + 1 : end;
    for (const uint8_t* q = line.begin; q < line.end; ++q) {
      if (!is_space(*q)) return true;
    }
  }
  return false;
}

bool find_text(Span line, std::string_view key, std::vector<uint8_t>& room, Text& text) {
  Scanner scanner(line);
  String found;
  const auto size = static_cast<size_t>(line.end - line.begin);
  uint8_t* end = nullptr;
  if (size <= kCopied) {
    if (room.size() < size + Cutter::kReadable) room.resize(2 * size + Cutter::kReadable);
    end = room.data();
  }
  if (!scanner.top_object(key, found, end)) return false;
  if (scanner.saw_high_bits() && !utf8::is_valid(line.begin, line.end)) return false;
  if (end) {
    std::memset(end, 0, Cutter::kReadable);
    text = Text::padded(room.data(), end);
  } else {
    text = Text(found.begin, found.end, found.escaped);
  }
  return true;
}

bool has_long_word(Text text) {
  if (text.most_bytes() <= kMaxWordBytes) return false;
  std::vector<uint8_t> part((64 << 10) + Text::kSlack);
  size_t length = 0;
  bool inside = false;
  while (!text.done()) {
    const size_t n = text.read(part.data(), 64 << 10);
    for (size_t i = 0; i < n; ++i) {
      const bool space = is_space(part[i]);
      length = space == inside ? length + 1 : 1;
      inside = space;
      if (length > kMaxWordBytes) return true;
    }
  }
  return false;
}

}  // namespace json_lines

size_t Text::read(uint8_t* out, size_t room) {
  const uint8_t* const begin = out;
  const uint8_t* const stop = out + room;
  if (!escaped_) {
    const size_t n = most_bytes() < room ? most_bytes() : room;
    if (n) std::memcpy(out, p_, n);
    p_ += n;
    return n;
  }
  while (p_ < end_ && stop - out >= 4) {
    if (*p_ != '\\') {
      const ptrdiff_t left = end_ - p_ < stop - out ? end_ - p_ : stop - out;
      bool high = false;
      const size_t n = simd::copy_until<simd::Backslash>(out, p_, p_ + left, high);
      p_ += n;
      out += n;
    } else if (p_[1] == 'u') {
      out = utf8::append(out, json_lines::read_unicode(p_, end_));
    } else {
      *out++ = json_lines::kShortEscapes[p_[1]];
      p_ += 2;
    }
  }
  return static_cast<size_t>(out - begin);
}
