// Loops over documents and samples: checking an .idx, packing documents into rows, blending datasets.
// Twins: document_boundaries.py, packing.py, blend.py and megatron_sample_order.py in lmtrain/data.

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bind.h"

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
T load(const uint8_t* bytes, int64_t i) {  // the arrays of an .idx lie at odd addresses
  T value;
  std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

int lowest_bit(uint64_t word) {
#if defined(__GNUC__)
  return __builtin_ctzll(word);
#else
  int bit = 0;
  while (!(word >> bit & 1)) ++bit;
  return bit;
#endif
}

// ---- the entries of an .idx ---------------------------------------------------------------------------------------

// Whether each sequence begins where the one before it ends; `pointers` has one entry more than `lengths`.
bool sequences_follow(const Array<uint8_t>& lengths, const Array<uint8_t>& pointers, int64_t itemsize) {
  const int64_t count = lengths.size() / 4;
  if (lengths.size() != 4 * count || pointers.size() != 8 * (count + 1)) throw std::invalid_argument("sizes differ");
  const uint8_t *length = lengths.data(), *pointer = pointers.data();
  py::gil_scoped_release release;
  uint64_t wrong = 0;  // unsigned, because the numbers may be anything
  for (int64_t i = 0; i < count; ++i) {
    const int32_t tokens = load<int32_t>(length, i);
    const uint64_t bytes = static_cast<uint64_t>(tokens) * static_cast<uint64_t>(itemsize);
    wrong |= (load<uint64_t>(pointer, i + 1) - load<uint64_t>(pointer, i)) ^ bytes;
    wrong |= static_cast<uint64_t>(tokens < 0);
  }
  return wrong == 0;
}

// 0: the bounds of documents go down somewhere; 1: they rise or stay; 2: each is one more than the one before.
int bounds_rise(const Array<uint8_t>& bounds) {
  const int64_t count = bounds.size() / 8;
  const uint8_t* bound = bounds.data();
  py::gil_scoped_release release;
  bool rising = true, by_one = true;
  for (int64_t i = 1; i < count; ++i) {
    const int64_t before = load<int64_t>(bound, i - 1), here = load<int64_t>(bound, i);
    rising &= here >= before;
    by_one &= static_cast<uint64_t>(here) == static_cast<uint64_t>(before) + 1;
  }
  return rising ? (by_one ? 2 : 1) : 0;
}

// ---- best fit -----------------------------------------------------------------------------------------------------

// The bin of each piece: largest first, each into the fullest bin with room, of equally full ones into that which
// became so last. Bins are numbered as they are opened.
Array<int64_t> best_fit(const Array<int32_t>& sizes, int64_t capacity) {
  const int64_t count = sizes.size();
  if (capacity < 1 || capacity > (int64_t{1} << 31)) throw std::invalid_argument("capacity must lie in 1..2^31");
  const int32_t* size = sizes.data();
  for (int64_t i = 0; i < count; ++i) {
    if (size[i] < 1 || size[i] > capacity) throw std::invalid_argument("sizes must lie in 1..capacity");
  }
  Array<int64_t> result(count);
  int64_t* bin_of = result.mutable_data();
  py::gil_scoped_release release;

  std::vector<int64_t> begin(capacity + 2, 0), sorted(count);  // a counting sort, largest first
  for (int64_t i = 0; i < count; ++i) ++begin[capacity - size[i] + 1];
  for (int64_t s = 0; s <= capacity; ++s) begin[s + 1] += begin[s];
  for (int64_t i = 0; i < count; ++i) sorted[begin[capacity - size[i]]++] = i;

  std::vector<int64_t> top(capacity + 1, -1), below;  // for each room a stack of bins with that room left
  std::vector<uint64_t> present(capacity / 64 + 1, 0);
  for (int64_t i : sorted) {
    int64_t word = size[i] / 64;
    uint64_t bits = present[word] & (~uint64_t{0} << (size[i] % 64));
    while (bits == 0 && ++word < static_cast<int64_t>(present.size())) bits = present[word];
    int64_t bin = static_cast<int64_t>(below.size()), room = capacity;
    if (bits == 0) {
      below.push_back(-1);
    } else {
      room = word * 64 + lowest_bit(bits);
      bin = top[room];
      if ((top[room] = below[bin]) < 0) present[room / 64] &= ~(uint64_t{1} << (room % 64));
    }
    bin_of[i] = bin;
    room -= size[i];
    below[bin] = top[room];
    top[room] = bin;
    if (room > 0) present[room / 64] |= uint64_t{1} << (room % 64);
  }
  return result;
}

// ---- blends -------------------------------------------------------------------------------------------------------

constexpr int64_t kBlendBlock = 1 << 16;  // what a core's cache holds

// Which dataset each position of a blend takes: of those whose next sample may come, the one whose must come first,
// and of equals the first. Sample j of a dataset with `share` of every `total` positions may come from position
// floor(j * total / share) on, and must have come by ceil((j + 1) * total / share) - 1. Kept up, no count is ever off
// by one from its share. Done a block at a time by the other way to the same answer: samples in the order in which
// they must come, each at the first free position from which it may.
class BlendBlock {
 public:
  // `counts`: how many samples each dataset has given before `start`; afterwards, before `start + size`.
  void fill(const int64_t* shares, int64_t* counts, int64_t num, uint64_t total, uint64_t start, int32_t size) {
    size_ = size;
    dataset_.assign(size, -1);
    due_in_.assign(size + 1, 0);
    words_.assign(size / 64 + 1, ~uint64_t{0});
    summary_.assign(words_.size() / 64 + 1, ~uint64_t{0});
    num_certain_ = 0;
    certain_.resize(size);
    sorted_.resize(size);
    later_.clear();
    const uint64_t end = start + static_cast<uint64_t>(size);
    for (int64_t d = 0; d < num; ++d) {
      const uint64_t share = static_cast<uint64_t>(shares[d]);
      counts[d] += collect(share, counts[d], static_cast<int32_t>(d), total, start, end);
    }
    sort_by_due();
    for (int64_t i = 0; i < num_certain_; ++i) place(sorted_[i]);
    std::sort(later_.begin(), later_.end(), [](const Late& a, const Late& b) {
      return a.due != b.due ? a.due < b.due : a.sample.dataset < b.sample.dataset;
    });
    for (const Late& one : later_) counts[one.sample.dataset] += place(one.sample);
  }

  int32_t dataset(int64_t i) const { return dataset_[i]; }

 private:
  struct Sample {
    int32_t from, dataset;  // the position of the block from which it may come
  };
  struct Certain {  // must come within the block, by this position of it
    int32_t due;
    Sample sample;
  };
  struct Late {  // may come within the block, need not
    uint64_t due;
    Sample sample;
  };

  // Notes every sample of a dataset that may come before `end`; says how many of them must.
  int64_t collect(uint64_t share, int64_t count, int32_t dataset, uint64_t total, uint64_t start, uint64_t end) {
    const uint64_t whole = total / share, part = total % share;
    const unsigned __int128 product = static_cast<unsigned __int128>(count) * total;
    uint64_t from = static_cast<uint64_t>(product / share), rest = static_cast<uint64_t>(product % share);
    Certain* const first = certain_.data() + num_certain_;
    Certain* const last = certain_.data() + size_;
    Certain* out = first;
    while (from < end) {
      const Sample sample{static_cast<int32_t>(std::max(from, start) - start), dataset};
      rest += part;
      const uint64_t carry = rest >= share;
      rest -= carry ? share : 0;
      from += whole + carry;
      const uint64_t due = from - (rest == 0);
      if (due >= end) {
        later_.push_back({due, sample});
        continue;
      }
      if (out == last || due < start) throw std::invalid_argument("the counts are behind");
      *out++ = {static_cast<int32_t>(due - start), sample};
      ++due_in_[due - start + 1];
    }
    num_certain_ += out - first;
    return out - first;
  }

  void sort_by_due() {
    for (int32_t i = 0; i < size_; ++i) due_in_[i + 1] += due_in_[i];
    for (int64_t i = 0; i < num_certain_; ++i) sorted_[due_in_[certain_[i].due]++] = certain_[i].sample;
  }

  int place(const Sample& sample) {
    const int32_t at = first_free(sample.from);
    if (at >= size_) return 0;
    dataset_[at] = sample.dataset;
    if ((words_[at / 64] &= ~(uint64_t{1} << (at % 64))) == 0) {
      summary_[at / 4096] &= ~(uint64_t{1} << (at / 64 % 64));
    }
    return 1;
  }

  int32_t first_free(int32_t from) const {  // behind the last position all are free
    uint64_t bits = words_[from / 64] & (~uint64_t{0} << (from % 64));
    int32_t word = from / 64;
    if (bits == 0) {
      ++word;
      int32_t group = word / 64;
      uint64_t left = group < static_cast<int32_t>(summary_.size())
                          ? summary_[group] & (~uint64_t{0} << (word % 64)) : 0;
      while (left == 0) {
        if (++group >= static_cast<int32_t>(summary_.size())) return size_;
        left = summary_[group];
      }
      word = group * 64 + lowest_bit(left);
      if (word >= static_cast<int32_t>(words_.size())) return size_;
      bits = words_[word];
    }
    return word * 64 + lowest_bit(bits);
  }

  int32_t size_ = 0;
  std::vector<int32_t> dataset_, due_in_;
  std::vector<uint64_t> words_, summary_;  // free positions, and which words of them are not 0
  int64_t num_certain_ = 0;
  std::vector<Certain> certain_;
  std::vector<Late> later_;
  std::vector<Sample> sorted_;
};

// Positions start to start + count - 1 of a blend: (dataset, which of its samples) of each, and the counts after them.
// `keep` false: the counts only.
py::tuple blend(const Array<int64_t>& shares, const Array<int64_t>& counts, int64_t start, int64_t count, bool keep) {
  const int64_t num = shares.size();
  uint64_t total = 0;
  int64_t taken = 0;
  if (num < 1 || num > (int64_t{1} << 30) || counts.size() != num) throw std::invalid_argument("sizes differ");
  for (int64_t d = 0; d < num; ++d) {
    if (shares.data()[d] < 1 || shares.data()[d] > (int64_t{1} << 48)) throw std::invalid_argument("a wrong share");
    if (counts.data()[d] < 0 || counts.data()[d] > shares.data()[d]) throw std::invalid_argument("a wrong count");
    total += static_cast<uint64_t>(shares.data()[d]);
    taken += counts.data()[d];
    if (total > uint64_t{1} << 48) throw std::invalid_argument("the shares are too large");
  }
  if (start < 0 || taken != start || count < 0 || static_cast<uint64_t>(count) > total - static_cast<uint64_t>(start)) {
    throw std::invalid_argument("the counts are not of this position");
  }
  Array<int32_t> datasets(keep ? count : 0);
  Array<int64_t> samples(keep ? count : 0), after(num);
  int32_t* dataset = datasets.mutable_data();
  int64_t *sample = samples.mutable_data(), *given = after.mutable_data();
  std::copy_n(counts.data(), num, given);
  {
    py::gil_scoped_release release;
    BlendBlock block;
    std::vector<int64_t> next(counts.data(), counts.data() + num);
    for (int64_t at = 0; at < count;) {
      const int32_t size = static_cast<int32_t>(std::min<int64_t>(count - at, kBlendBlock));
      block.fill(shares.data(), given, num, total, static_cast<uint64_t>(start + at), size);
      for (int64_t i = 0; keep && i < size; ++i) {
        dataset[at + i] = block.dataset(i);
        sample[at + i] = next[block.dataset(i)]++;
      }
      at += size;
    }
  }
  return py::make_tuple(datasets, samples, after);
}

// Megatron-LM's rule: position i takes the dataset that is furthest behind weight * i, the first of equals.
py::tuple megatron_blend(const Array<double>& weights, int64_t count) {
  const int64_t num = weights.size();
  if (num < 1 || num > 32767 || count < 0) throw std::invalid_argument("1 to 32767 datasets");
  Array<int16_t> datasets(count);
  Array<int64_t> samples(count);
  int16_t* dataset = datasets.mutable_data();
  int64_t* sample = samples.mutable_data();
  const double* weight = weights.data();
  {
    py::gil_scoped_release release;
    std::vector<int64_t> counts(num, 0);
    for (int64_t i = 0; i < count; ++i) {
      const double position = static_cast<double>(std::max<int64_t>(i, 1));
      int64_t chosen = 0;
      double most = weight[0] * position - static_cast<double>(counts[0]);
      for (int64_t d = 1; d < num; ++d) {
        const double behind = weight[d] * position - static_cast<double>(counts[d]);
        if (behind > most) most = behind, chosen = d;
      }
      dataset[i] = static_cast<int16_t>(chosen);
      sample[i] = counts[chosen]++;
    }
  }
  return py::make_tuple(datasets, samples);
}

}  // namespace

void bind_index(py::module_& module) {
  module.def("sequences_follow", &sequences_follow, py::arg("lengths"), py::arg("pointers"), py::arg("itemsize"),
             "Whether the pointers of an .idx are the running sums of its lengths.");
  module.def("bounds_rise", &bounds_rise, py::arg("bounds"), "0: somewhere down; 1: never down; 2: each one more.");
  module.def("best_fit", &best_fit, py::arg("sizes"), py::arg("capacity"), "The bin of each piece.");
  module.def("blend", &blend, py::arg("shares"), py::arg("counts"), py::arg("start"), py::arg("count"),
             py::arg("keep"), "Dataset and sample of each position of a blend, and the counts after them.");
  module.def("megatron_blend", &megatron_blend, py::arg("weights"), py::arg("count"),
             "Dataset and sample of each position of a blend, by Megatron-LM's rule.");
}
