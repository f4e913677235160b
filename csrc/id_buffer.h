// A growing array of ids that becomes a numpy array without a copy.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

// Ids end to end, in memory that may be handed away. Room is asked for first, then written without looking.
template <class Id>
class IdBuffer {
 public:
  IdBuffer() = default;
  IdBuffer(const IdBuffer&) = delete;
  IdBuffer& operator=(const IdBuffer&) = delete;
  ~IdBuffer() { std::free(data_); }

  Id* reserve(size_t room) {  // where the next `room` ids may be written
    if (size_ + room > capacity_) resize((size_ + room) * 3 / 2);
    return data_ + size_;
  }
  void set_end(const Id* end) { size_ = static_cast<size_t>(end - data_); }
  void truncate(size_t size) { size_ = size; }
  size_t size() const { return size_; }

  Id* release() {  // the caller frees it
    resize(size_ ? size_ : 1);
    Id* data = data_;
    data_ = nullptr;
    size_ = capacity_ = 0;
    return data;
  }

 private:
  void resize(size_t capacity) {
    void* data = std::realloc(data_, capacity * sizeof(Id));
    if (data == nullptr) throw std::bad_alloc();
    data_ = static_cast<Id*>(data);
    capacity_ = capacity;
  }

  Id* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};
