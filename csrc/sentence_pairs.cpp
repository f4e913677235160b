// Which sentences make a sample: documents cut into runs of sentences of about a target length. Two orders of random
// numbers, ours and Megatron-LM's. Twins: build_map_twin and build_megatron_map_twin in lmtrain/data/samples/group_sentences_into_samples.py.

#include <pybind11/numpy.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "bind.h"
#include "draws.h"

namespace {

constexpr int32_t kLongestSentence = 512;  // because: Megatron-LM leaves out documents with a longer one

// An array of an .idx file, whose entries are not aligned.
template <class T>
class Column {
 public:
  explicit Column(const py::array& array) : data_(static_cast<const char*>(array.data())), size_(array.size()) {
    const bool plain = array.ndim() == 1 && array.itemsize() == sizeof(T) && (array.flags() & py::array::c_style);
    if (!plain) throw std::invalid_argument("lengths must be int32 and bounds int64, without gaps");
  }

  int64_t size() const { return size_; }
  T operator[](int64_t i) const {
    T value;
    std::memcpy(&value, data_ + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }

 private:
  const char* data_;
  int64_t size_;
};

struct Documents {
  Column<int32_t> lengths;  // tokens of each sentence
  Column<int64_t> bounds;   // document d is sentences bounds[d] to bounds[d + 1] - 1

  Documents(const py::array& lengths, const py::array& bounds) : lengths(lengths), bounds(bounds) {
    int64_t last = 0;
    for (int64_t d = 0; d < this->bounds.size(); ++d) {
      if (this->bounds[d] < last || this->bounds[d] > this->lengths.size()) {
        throw std::invalid_argument("the document bounds must rise and lie within the sentences");
      }
      last = this->bounds[d];
    }
  }

  int64_t count() const { return bounds.size() > 0 ? bounds.size() - 1 : 0; }
};

// Calls emit(first, last + 1, target) for each sample of sentences begin..end-1. No sample has fewer than two sentences
// or `min_sentences` but at the end of a document.
template <class Target, class Emit>
void cut(const Documents& documents, int64_t begin, int64_t end, int64_t min_sentences, Target target_of, Emit emit) {
  int64_t first = begin, tokens = 0, target = target_of(first);
  for (int64_t i = begin; i < end; ++i) {
    tokens += documents.lengths[i];
    const int64_t count = i + 1 - first, left = end - i - 1;
    if ((tokens >= target && left > 1 && count >= min_sentences) || left == 0) {
      emit(first, i + 1, target);
      first = i + 1;
      tokens = 0;
      target = target_of(first);
    }
  }
}

// Runs `walk(emit)` twice: to count the samples, then to store them.
template <class T, class Walk>
py::array stored(Walk walk) {
  int64_t count = 0;
  {
    py::gil_scoped_release release;
    walk([&](int64_t, int64_t, int64_t) { ++count; });
  }
  py::array_t<T> rows({count, int64_t{3}});
  T* out = rows.mutable_data();
  {
    py::gil_scoped_release release;
    walk([&](int64_t first, int64_t end, int64_t target) {
      for (const int64_t value : {first, end, target}) *out++ = static_cast<T>(value);
    });
  }
  return rows;
}

template <class Walk>
py::array stored(const Documents& documents, Walk walk) {
  return documents.lengths.size() > int64_t{UINT32_MAX} ? stored<uint64_t>(walk) : stored<uint32_t>(walk);
}

void check(int64_t max_tokens) {
  if (max_tokens < 2) throw std::invalid_argument("max_tokens must be at least 2");
}

// The target of a sample is drawn from the stream of its first sentence: max_tokens, or a short one.
py::array build_map(const py::array& lengths, const py::array& bounds, int64_t max_tokens, uint64_t short_threshold,
                    int64_t min_sentences, uint64_t seed) {
  check(max_tokens);
  const Documents documents(lengths, bounds);
  const auto target_of = [&](int64_t first) {
    lmtrain::Draws draws{lmtrain::stream(seed, static_cast<uint64_t>(first))};
    if ((draws.next() >> 32) >= short_threshold) return max_tokens;
    return 2 + static_cast<int64_t>(draws.below(static_cast<uint64_t>(max_tokens - 1)));
  };
  return stored(documents, [&](auto emit) {
    for (int64_t d = 0; d < documents.count(); ++d) {
      const int64_t begin = documents.bounds[d], end = documents.bounds[d + 1];
      if (end - begin >= min_sentences) cut(documents, begin, end, min_sentences, target_of, emit);
    }
  });
}

bool megatron_takes(const Documents& documents, int64_t begin, int64_t end, int64_t min_sentences) {
  if (end - begin < min_sentences || end == begin) return false;
  for (int64_t i = begin; end - begin > 1 && i < end; ++i) {
    if (documents.lengths[i] > kLongestSentence) return false;
  }
  return true;
}

template <class T>
void shuffle_rows(py::array& array, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int64_t count = array.shape(0);
  T* rows = static_cast<T*>(array.mutable_data());
  py::gil_scoped_release release;
  for (int64_t i = count - 1; i > 0; --i) {
    const auto j = static_cast<int64_t>(random() % static_cast<uint64_t>(i + 1));
    for (int k = 0; k < 3; ++k) std::swap(rows[3 * i + k], rows[3 * j + k]);
  }
}

// Epoch after epoch from one Mersenne Twister until there are max_samples, then shuffled as a whole.
py::array build_megatron_map(const py::array& lengths, const py::array& bounds, int64_t num_epochs, int64_t max_samples,
                             int64_t max_tokens, int64_t short_ratio, int64_t min_sentences, uint64_t seed) {
  check(max_tokens);
  const Documents documents(lengths, bounds);
  py::array rows = stored(documents, [&](auto emit) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    const auto target_of = [&](int64_t) {
      if (short_ratio == 0) return max_tokens;
      const int64_t drawn = random();
      return drawn % short_ratio == 0 ? 2 + drawn % (max_tokens - 1) : max_tokens;
    };
    int64_t count = 0;
    for (int64_t epoch = 0, before = -1; epoch < num_epochs && count < max_samples && count > before; ++epoch) {
      before = count;  // an epoch without a sample is the last
      for (int64_t d = 0; d < documents.count(); ++d) {
        const int64_t begin = documents.bounds[d], end = documents.bounds[d + 1];
        if (!megatron_takes(documents, begin, end, min_sentences)) continue;
        cut(documents, begin, end, min_sentences, target_of, [&](int64_t first, int64_t last, int64_t target) {
          ++count;
          emit(first, last, target);
        });
      }
    }
  });
  if (rows.itemsize() == 8) shuffle_rows<uint64_t>(rows, seed + 1);
  else shuffle_rows<uint32_t>(rows, seed + 1);
  return rows;
}

}  // namespace

void bind_sentence_pairs(py::module_& module) {
  module.def("build_map", &build_map, py::arg("lengths"), py::arg("bounds"), py::arg("max_tokens"),
             py::arg("short_threshold"), py::arg("min_sentences"), py::arg("seed"),
             "Samples of sentences in our order: uint32 or uint64 [n, 3] of first, last + 1, target.");
  module.def("build_megatron_map", &build_megatron_map, py::arg("lengths"), py::arg("bounds"), py::arg("num_epochs"),
             py::arg("max_samples"), py::arg("max_tokens"), py::arg("short_ratio"), py::arg("min_sentences"),
             py::arg("seed"), "The same in Megatron-LM's order.");
}
