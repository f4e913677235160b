#include "words.h"

#include <cstring>
#include <stdexcept>

void Window::drop(size_t n) {
  if (n == 0) return;
  std::memmove(bytes_.data(), bytes_.data() + n, size_ - n);
  size_ -= n;
}

uint8_t* Window::reserve(size_t room) {
  const size_t needed = size_ + room + Cutter::kReadable;
  if (needed > UINT32_MAX) throw std::length_error("a word longer than 4 GiB");
  if (needed > bytes_.size()) bytes_.resize(needed + needed / 2);
  data_ = bytes_.data();
  return bytes_.data() + size_;
}

void Window::pad() { std::memset(bytes_.data() + size_, 0, Cutter::kReadable); }
