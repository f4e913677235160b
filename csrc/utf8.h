// UTF-8: one character at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace utf8 {

inline int length(uint8_t lead) { return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4; }

// The character at p, of text known to be valid; n becomes its number of bytes.
inline uint32_t decode(const uint8_t* p, int& n) {
  n = length(*p);
  if (n == 1) return p[0];
  if (n == 2) return (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu);
  if (n == 3) return (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
  return (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
}

// Writes a character (or half of a surrogate pair, which compares unequal to any text) and returns where it ends.
inline uint8_t* append(uint8_t* out, uint32_t c) {
  if (c < 0x80) {
    *out++ = static_cast<uint8_t>(c);
  } else if (c < 0x800) {
    *out++ = static_cast<uint8_t>(0xC0 | c >> 6);
    *out++ = static_cast<uint8_t>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    *out++ = static_cast<uint8_t>(0xE0 | c >> 12);
    *out++ = static_cast<uint8_t>(0x80 | (c >> 6 & 0x3F));
    *out++ = static_cast<uint8_t>(0x80 | (c & 0x3F));
  } else {
    *out++ = static_cast<uint8_t>(0xF0 | c >> 18);
    *out++ = static_cast<uint8_t>(0x80 | (c >> 12 & 0x3F));
    *out++ = static_cast<uint8_t>(0x80 | (c >> 6 & 0x3F));
    *out++ = static_cast<uint8_t>(0x80 | (c & 0x3F));
  }
  return out;
}

// Whether bytes are UTF-8: shortest forms only, no surrogates, nothing beyond U+10FFFF.
bool is_valid(const uint8_t* p, const uint8_t* end);

}  // namespace utf8
