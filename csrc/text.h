// A document as it lies in a slice of JSON lines, or bare: read in portions, so that no copy of all of it is made.
#pragma once

#include <cstddef>
#include <cstdint>

class Text {
 public:
  Text() = default;
  // `escaped`: the bytes are the inside of a JSON string that holds backslashes. They are known to be well formed.
  Text(const uint8_t* begin, const uint8_t* end, bool escaped) : p_(begin), end_(end), escaped_(escaped) {}

  // Bare text that lies in memory of its own, with Cutter::kReadable zeroes behind it: it need not be copied.
  static Text padded(const uint8_t* begin, const uint8_t* end) {
    Text text(begin, end, false);
    text.padded_ = true;
    return text;
  }

  // Writes up to `room` bytes of text (at least kMinRoom of room, and kSlack bytes beyond, are there); returns how many.
  // A portion may end inside a character.
  size_t read(uint8_t* out, size_t room);

  bool done() const { return p_ == end_; }
  bool is_padded() const { return padded_; }
  const uint8_t* data() const { return p_; }
  size_t most_bytes() const { return static_cast<size_t>(end_ - p_); }  // left to read; escapes make it fewer

  static constexpr size_t kMinRoom = 16, kSlack = 16;

 private:
  const uint8_t* p_ = nullptr;
  const uint8_t* end_ = nullptr;
  bool escaped_ = false, padded_ = false;
};
