// JSON lines: the text under a key. Twin: lmtrain/tokenizer/text_from_json_lines.py, which also says what is wrong with a line.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "text.h"

namespace json_lines {

struct Span {
  const uint8_t *begin, *end;
};

// The next line of p..end, without its "\n" and skipping lines of white space; p moves behind it. False at the end.
bool next_line(const uint8_t*& p, const uint8_t* end, Span& line);

// The text under `key` at the top of one line's object; false if the line is bad in any way. The text may lie in `room`,
// which must live as long.
bool find_text(Span line, std::string_view key, std::vector<uint8_t>& room, Text& text);

// Whether white space, or the lack of it, goes on for longer than any word may.
bool has_long_word(Text text);

constexpr int kMaxDepth = 256;
constexpr int kMaxDigits = 4300;
constexpr size_t kMaxWordBytes = 4 << 20;
constexpr size_t kCopied = 1 << 20;  // lines up to this size are unescaped while they are checked, not later

}  // namespace json_lines
