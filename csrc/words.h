// Cutting a text into the words that are encoded one by one, a portion at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "text.h"

// Word i is text[starts[i]] .. text[ends[i]]; at least kReadable bytes behind the last word may be read.
struct Words {
  const uint8_t* text;
  const uint32_t* starts;
  const uint32_t* ends;
  size_t count;
};

class Cutter {
 public:
  virtual ~Cutter() = default;
  virtual void begin(Text text) = 0;
  virtual bool next(Words& words) = 0;  // false when there are no more; the words are good until the next call
  size_t num_text_bytes() const { return num_text_bytes_; }  // read since begin()

  static constexpr size_t kReadable = 96;
  static constexpr size_t kPortionBytes = 64 << 10;  // because: what is cut stays in the nearest caches
  static constexpr size_t kMostWords = 4096;

 protected:
  size_t num_text_bytes_ = 0;
};

// A Cutter's portion of text, with what is left of the one before.
class Window {
 public:
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  void clear() { show(nullptr, 0); }
  void show(const uint8_t* data, size_t size) {  // somebody else's memory
    data_ = data;
    size_ = size;
  }
  void drop(size_t n);           // the first n bytes
  uint8_t* reserve(size_t room);  // where `room` bytes, and kReadable beyond them, may be written
  void grow(size_t n) { size_ += n; }
  void pad();  // zeroes behind the text, for who reads beyond it

 private:
  std::vector<uint8_t> bytes_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

enum class Pattern { kGpt2, kCl100k };

// The words of a byte-level BPE: GPT-2's pattern, or that of cl100k and LLaMA 3.
class PatternCutter final : public Cutter {
 public:
  explicit PatternCutter(Pattern pattern);
  void begin(Text text) override;
  bool next(Words& words) override;

 private:
  // What the blocks before say of the first bytes of the next: the class of the last character, and the like.
  struct Carry {
    uint64_t letter = 0, number = 0, space = 0, other = 0, blank = 0;  // the last character's class; blank: ' '
    uint64_t gap = 0, newline = 0, taken = 0, lone = 0, tail = 0;      // see cl100k_starts
    uint64_t set = 0, clear = 0;  // starts that a contraction at the end of the block before moves
    int digits = 0;
  };
  struct Block;

  bool at_end() const { return last_ && scanned_ == window_.size(); }
  uint8_t class_at(const uint8_t* p) const;
  void refill();
  bool cut();
  template <Pattern P> bool cut_as();
  void classify(Block& block) const;
  uint64_t gpt2_starts(const Block& block);
  uint64_t cl100k_starts(const Block& block);
  uint64_t thirds(const Block& block);
  template <Pattern P> uint64_t apply_contractions(const Block& block, uint64_t starts, uint64_t candidates);

  Pattern pattern_;
  const uint8_t* classes_;
  Text text_;
  Window window_;
  std::vector<uint32_t> starts_;
  size_t num_starts_ = 0, handed_out_ = 0;
  size_t scanned_ = 0;
  bool last_ = false;  // the window ends where the text ends
  Carry carry_;
};
