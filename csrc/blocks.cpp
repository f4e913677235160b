// Checksums of the blocks of a token file: made while it is written, compared where it is read.
// Twins: in lmtrain/data/store/block_checksums.py.

#include <pybind11/numpy.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bind.h"
#include "crc32c.h"
#include "mapped.h"

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// The checksums of the blocks that `data` completes, where `filled` bytes with the checksum `crc` came before it; and
// the same two for the block that it leaves open.
py::tuple block_sums(const Array<uint8_t>& data, int64_t block_bytes, uint32_t crc, int64_t filled) {
  if (block_bytes < 1 || filled < 0 || filled >= block_bytes) throw std::invalid_argument("a wrong size");
  const uint8_t* p = data.data();
  int64_t left = data.size();
  std::vector<uint32_t> sums;
  {
    py::gil_scoped_release release;
    while (left > 0) {
      const int64_t now = std::min(left, block_bytes - filled);
      crc = lmtrain::crc32c(p, static_cast<size_t>(now), crc);
      p += now;
      left -= now;
      if ((filled += now) == block_bytes) {
        sums.push_back(crc);
        crc = 0;
        filled = 0;
      }
    }
  }
  Array<uint32_t> made(static_cast<py::ssize_t>(sums.size()));
  std::copy(sums.begin(), sums.end(), made.mutable_data());
  return py::make_tuple(made, crc, filled);
}

// because: asked for every batch, and fstat takes four times as long; nobody reads at the descriptor's place
bool shorter(int fd, int64_t size) { return fd >= 0 && lseek(fd, 0, SEEK_END) < size; }

constexpr uint8_t kUnchecked = 0, kChecked = 1, kUnknown = 2;

// Which blocks of a mapped token file were compared with their checksums: a state for each.
class BlockCheck {
 public:
  BlockCheck(const Array<uint8_t>& data, int64_t block_bytes, const Array<uint32_t>& sums, const Array<uint8_t>& state,
             int64_t width, int record, int fd)
      : data_(data), sums_(sums), state_(state), size_(data.size()), block_bytes_(block_bytes), width_(width),
        record_(record), fd_(fd) {
    if (block_bytes < 1 || width < 1 || sums.size() != state.size() ||
        state.size() != size_ / block_bytes + (size_ % block_bytes != 0)) {
      throw std::invalid_argument("the arrays do not belong together");
    }
    seen_ = state_.mutable_data();
  }

  // Looks at every block that one of the stretches (sizes[i] tokens from starts[i] on; one size may stand for all)
  // touches and that was not looked at before. The first whose checksum is not the known one is returned, or -1; or -2
  // where the file itself, `fd`, has become shorter, or any mapping could not be read. A block without a known checksum
  // is given one: eight bytes at its place in the file `record`, the checksum and its opposite; below 0 there is none.
  // Starts are given as numbers of rows of `stride` tokens, the first of which begins at token `first`.
  int64_t check(const Array<int64_t>& starts, const Array<int64_t>& sizes, int64_t stride, int64_t first) {
    const int64_t num = starts.size(), tokens = size_ / width_;
    if (stride < 1 || first < 0 || first > tokens || (sizes.size() != num && sizes.size() != 1)) {
      throw std::invalid_argument("the arrays do not belong together");
    }
    const int64_t *start = starts.data(), *length = sizes.data(), step = sizes.size() == num;
    for (int64_t i = 0; i < num; ++i) {
      const int64_t now = length[i * step];
      if (start[i] < 0 || now < 0 || start[i] > (tokens - first) / stride || now > tokens - first - start[i] * stride) {
        throw std::invalid_argument("a range of tokens lies outside the file");
      }
    }
    py::gil_scoped_release release;
    for (int64_t i = 0; i < num; ++i) {
      if (length[i * step] == 0) continue;
      const int64_t token = start[i] * stride + first, end = (token + length[i * step]) * width_;
      for (int64_t b = token * width_ / block_bytes_; b <= (end - 1) / block_bytes_; ++b) {
        if (seen_[b] != kChecked && !compare(b)) return shorter(fd_, size_) ? -2 : b;
      }
    }
    return shorter(fd_, size_) || lmtrain::mapping_failed() ? -2 : -1;
  }

 private:
  bool compare(int64_t b) {
    const int64_t at = b * block_bytes_;
    const uint32_t found = lmtrain::crc32c(data_.data() + at, static_cast<size_t>(std::min(block_bytes_, size_ - at)));
    if (seen_[b] == kUnchecked && found != sums_.data()[b]) return false;
    if (seen_[b] == kUnknown && record_ >= 0) {
      const uint64_t entry = static_cast<uint64_t>(~found) << 32 | found;
      // because: what cannot be recorded is checked by nobody later, and nothing else is wrong
      if (pwrite(record_, &entry, sizeof entry, b * 8) != sizeof entry) return true;
    }
    seen_[b] = kChecked;
    return true;
  }

  Array<uint8_t> data_;
  Array<uint32_t> sums_;
  Array<uint8_t> state_;
  uint8_t* seen_;
  int64_t size_, block_bytes_, width_;
  int record_, fd_;
};

// Whether one of the files (descriptor, size in bytes) has become shorter, or any mapping could not be read.
bool files_lost(const Array<int64_t>& files) {
  for (py::ssize_t i = 0; i + 1 < files.size(); i += 2) {
    if (shorter(static_cast<int>(files.data()[i]), files.data()[i + 1])) return true;
  }
  return lmtrain::mapping_failed();
}

}  // namespace

void bind_blocks(py::module_& module) {
  module.def("block_sums", &block_sums, py::arg("data"), py::arg("block_bytes"), py::arg("crc"), py::arg("filled"),
             "Checksums of the blocks that data completes, and those of the one it leaves open.");
  py::class_<BlockCheck>(module, "BlockCheck", "Which blocks of a mapped token file were compared.")
      .def(py::init<const Array<uint8_t>&, int64_t, const Array<uint32_t>&, const Array<uint8_t>&, int64_t, int, int>(),
           py::arg("data"), py::arg("block_bytes"), py::arg("sums"), py::arg("state").noconvert(), py::arg("width"),
           py::arg("record"), py::arg("fd"))
      .def("check", &BlockCheck::check, py::arg("starts"), py::arg("sizes"), py::arg("stride") = 1,
           py::arg("first") = 0, "The first block under these stretches whose checksum is wrong, or -1; -2: lost.");
  module.def("files_lost", &files_lost, py::arg("files"), "Whether one of these files is shorter or failed.");
}
