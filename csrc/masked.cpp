// BERT's samples: two runs of sentences, cut to length, with words masked. Everything random is drawn from the stream
// of the sample's number, so that a sample is the same in any batch. Twin: MaskedSamplerTwin in
// lmtrain/data/samples/masked_samples_python_fallback.py, where the recipe is told.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "draws.h"

namespace {

using lmtrain::Draws;
using Numbers = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

constexpr int64_t kIgnored = -100;
constexpr uint32_t kMask = 3435973837u;    // 0.8 * 2^32
constexpr uint32_t kRandom = 3865470567u;  // 0.9 * 2^32
enum Kind : uint8_t { kBegins = 0, kContinues = 1, kSpecial = 2 };
enum Pairs { kNone = 0, kNextSentence = 1, kSentenceOrder = 2 };

// A flat array whose entries may be unaligned, as those of an .idx file are.
struct Flat {
  py::array owner;
  const char* data;
  int64_t size, width;

  Flat(const py::array& array, std::vector<py::ssize_t> widths) : owner(array) {
    const bool known = std::count(widths.begin(), widths.end(), array.itemsize()) > 0;
    if (!known || !(array.flags() & py::array::c_style)) throw std::invalid_argument("an array of an unknown dtype");
    data = static_cast<const char*>(array.data());
    size = array.size();
    width = array.itemsize();
  }

  template <class T>
  T get(int64_t i) const {
    T value;
    std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }
};

struct Run {
  int64_t begin = 0, size = 0;  // tokens
};

struct Word {
  int32_t begin, end;  // places in the row
};

// One sample and what is needed to make it; reused from sample to sample.
struct Row {
  std::vector<int32_t> tokens;
  int32_t second = 0;  // where the second segment begins, or the length
  Run first_run, second_run;
  bool label = false;
  uint64_t mask_key = 0;
  std::vector<Word> words;
  std::vector<uint32_t> order;
  std::vector<uint8_t> taken;
  std::vector<int32_t> masked;  // places

  explicit Row(size_t seq_len) : taken(seq_len) {
    tokens.reserve(seq_len);
    words.reserve(seq_len);
    order.reserve(seq_len);
    masked.reserve(seq_len);
  }
};

int64_t count_ones(Draws& draws, int64_t bits) {  // among the first `bits` bits drawn
  int64_t ones = 0;
  for (; bits > 0; bits -= 64) {
    const uint64_t drawn = bits >= 64 ? draws.next() : draws.next() & ((uint64_t{1} << bits) - 1);
    ones += static_cast<int64_t>(std::bitset<64>(drawn).count());
  }
  return ones;
}

// Takes tokens from the longer run, from the second where they are equal, each from its front or its back.
void shorten(Run& a, Run& b, int64_t target, Draws& draws) {
  const int64_t excess = a.size + b.size - target;
  if (excess <= 0) return;
  const int64_t level = std::min(excess, std::abs(a.size - b.size)), rest = excess - level;
  const int64_t from_a = rest / 2 + (a.size > b.size ? level : 0), from_b = excess - from_a;
  a.begin += count_ones(draws, from_a);
  a.size -= from_a;
  b.begin += count_ones(draws, from_b);
  b.size -= from_b;
}

class MaskedSampler {
 public:
  MaskedSampler(const py::array& tokens, const py::array& lengths, const py::array& pointers, const py::array& bounds,
                const py::array& rows, const py::array& kinds, const std::vector<uint64_t>& specials, int32_t cls,
                int32_t sep, int32_t mask, int32_t pad, int64_t seq_len, int pairs, uint64_t share,
                int64_t max_predictions, const std::vector<uint64_t>& ngram_thresholds, uint64_t seed)
      : tokens_(tokens, {2, 4}), lengths_(lengths, {4}), pointers_(pointers, {8}), bounds_(bounds, {8}),
        rows_(rows, {4, 8}), kinds_(kinds, {1}), specials_(specials), cls_(cls), sep_(sep), mask_(mask), pad_(pad),
        seq_len_(seq_len), num_rows_(rows_.size / 3), pairs_(pairs), share_(share), max_predictions_(max_predictions),
        ngram_thresholds_(ngram_thresholds), seed_(seed) {
    if (seq_len_ < 5 || num_rows_ < 1 || lengths_.size != pointers_.size || bounds_.size < 2 || share_ >> 32) {
      throw std::invalid_argument("seq_len, rows, lengths and pointers do not belong together");
    }
  }

  // tokens, labels, segments, what is no padding, pair labels, and the runs of tokens that were read
  py::tuple batch(const Numbers& ids) const {
    check(ids);
    const auto count = static_cast<int64_t>(ids.size());
    py::array_t<int64_t> tokens({count, seq_len_}), labels({count, seq_len_}), segments({count, seq_len_}), pair(count);
    py::array_t<int64_t> runs({int64_t{2}, 2 * count});
    py::array_t<bool> real({count, seq_len_});
    int64_t *tokens_at = tokens.mutable_data(), *labels_at = labels.mutable_data(), *pair_at = pair.mutable_data();
    int64_t *segments_at = segments.mutable_data(), *runs_at = runs.mutable_data();
    bool* real_at = real.mutable_data();
    const int64_t* id = ids.data();
    {
      py::gil_scoped_release release;
      Row row(static_cast<size_t>(seq_len_));
      for (int64_t i = 0; i < count; ++i) {
        make(static_cast<uint64_t>(id[i]), row);
        const int64_t at = i * seq_len_, size = static_cast<int64_t>(row.tokens.size());
        std::copy(row.tokens.begin(), row.tokens.end(), tokens_at + at);
        std::fill(tokens_at + at + size, tokens_at + at + seq_len_, int64_t{pad_});
        std::fill_n(labels_at + at, seq_len_, kIgnored);
        std::fill_n(segments_at + at, seq_len_, 0);
        std::fill(segments_at + at + row.second, segments_at + at + size, 1);
        std::fill_n(real_at + at, size, true);
        std::fill(real_at + at + size, real_at + at + seq_len_, false);
        for (const int32_t place : row.masked) {
          labels_at[at + place] = row.tokens[static_cast<size_t>(place)];
          tokens_at[at + place] = replaced(row, place);
        }
        pair_at[i] = row.label;
        note(row.first_run, row.second_run, runs_at + 2 * i, count);
      }
    }
    return py::make_tuple(tokens, labels, segments, real, pair, runs);
  }

  // of each sample: tokens that are masked, and all tokens; and the runs that were read
  py::tuple counts(const Numbers& ids) const {
    check(ids);
    const auto count = static_cast<int64_t>(ids.size());
    py::array_t<int64_t> result({count, int64_t{2}}), runs({int64_t{2}, 2 * count});
    int64_t *out = result.mutable_data(), *runs_at = runs.mutable_data();
    const int64_t* id = ids.data();
    {
      py::gil_scoped_release release;
      Row row(static_cast<size_t>(seq_len_));
      for (int64_t i = 0; i < count; ++i) {
        make(static_cast<uint64_t>(id[i]), row);
        out[2 * i] = static_cast<int64_t>(row.masked.size());
        out[2 * i + 1] = static_cast<int64_t>(row.tokens.size());
        note(row.first_run, row.second_run, runs_at + 2 * i, count);
      }
    }
    return py::make_tuple(result, runs);
  }

  // of each sample and either segment: the first tokens, and under them the numbers of tokens
  py::array_t<int64_t> runs(const Numbers& ids) const {
    check(ids);
    const auto count = static_cast<int64_t>(ids.size());
    py::array_t<int64_t> result({int64_t{2}, 2 * count});
    int64_t* out = result.mutable_data();
    const int64_t* id = ids.data();
    py::gil_scoped_release release;
    for (int64_t i = 0; i < count; ++i) {
      Draws draws{lmtrain::stream(seed_, static_cast<uint64_t>(id[i]))};
      bool label = false;
      const auto [a, b] = runs_of(static_cast<int64_t>(static_cast<uint64_t>(id[i]) % static_cast<uint64_t>(num_rows_)),
                                  draws, label);
      note(a, b, out + 2 * i, count);
    }
    return result;
  }

 private:
  // A row of first tokens, and under it a row of sizes.
  static void note(const Run& a, const Run& b, int64_t* out, int64_t count) {
    out[0] = a.begin;
    out[1] = b.begin;
    out[2 * count] = a.size;
    out[2 * count + 1] = b.size;
  }

  static void check(const Numbers& ids) {
    if (ids.ndim() != 1) throw std::invalid_argument("ids must have one dimension");
    for (py::ssize_t i = 0; i < ids.size(); ++i) {
      if (ids.data()[i] < 0) throw std::invalid_argument("sample ids begin at 0");
    }
  }

  void make(uint64_t id, Row& row) const {
    const uint64_t key = lmtrain::stream(seed_, id);
    Draws draws{key};
    row.mask_key = lmtrain::stream(key, 1);
    gather(static_cast<int64_t>(id % static_cast<uint64_t>(num_rows_)), draws, row);
    find_words(row);
    choose(draws, row);
  }

  // ---- the text

  int64_t in_row(int64_t i, int column) const {
    const int64_t at = 3 * i + column;
    return rows_.width == 4 ? rows_.get<uint32_t>(at) : static_cast<int64_t>(rows_.get<uint64_t>(at));
  }

  Run run_of(int64_t first, int64_t end) const {
    if (first >= end) return {0, 0};
    if (first < 0 || end > lengths_.size) throw std::invalid_argument("a sample lies outside the sentences");
    Run run{pointers_.get<int64_t>(first) / tokens_.width, 0};
    for (int64_t i = first; i < end; ++i) run.size += lengths_.get<int32_t>(i);
    if (run.begin < 0 || run.size < 0 || run.begin > tokens_.size || run.size > tokens_.size - run.begin) {
      throw std::invalid_argument("a sentence lies outside the tokens");
    }
    return run;
  }

  // The tokens of the two segments.
  std::pair<Run, Run> runs_of(int64_t number, Draws& draws, bool& label) const {
    const int64_t first = in_row(number, 0), end = in_row(number, 1), target = in_row(number, 2);
    const int64_t room = seq_len_ - (pairs_ == kNone ? 2 : 3);
    if (target < 0 || target > room) throw std::invalid_argument("a sample is longer than seq_len");
    int64_t pivot = end;
    label = false;
    if (pairs_ != kNone) {
      pivot = first + 1;
      if (end - first >= 3) pivot += static_cast<int64_t>(draws.below(static_cast<uint64_t>(end - first - 1)));
      label = draws.next() >> 63;
    }
    Run a = run_of(first, pivot);
    Run b = pairs_ == kNextSentence && label ? other(first, target - a.size, draws) : run_of(pivot, end);
    if (pairs_ == kSentenceOrder && label) std::swap(a, b);
    shorten(a, b, target, draws);
    return {a, b};
  }

  void gather(int64_t number, Draws& draws, Row& row) const {
    std::tie(row.first_run, row.second_run) = runs_of(number, draws, row.label);
    row.tokens.assign(1, cls_);
    append(row.first_run, row);
    row.tokens.push_back(sep_);
    row.second = static_cast<int32_t>(row.tokens.size());
    if (pairs_ == kNone) return;
    append(row.second_run, row);
    row.tokens.push_back(sep_);
  }

  // Sentences of another document, at least one and then while there is room.
  Run other(int64_t sentence, int64_t room, Draws& draws) const {
    const int64_t d = std::min(first_above(sentence), bounds_.size - 1);  // the document's end in bounds
    const int64_t low = row_at_least(bounds_.get<int64_t>(std::max<int64_t>(d - 1, 0)));
    const int64_t num_own = row_at_least(bounds_.get<int64_t>(d)) - low;
    if (num_own >= num_rows_) throw std::invalid_argument("there is no other document");
    int64_t number = static_cast<int64_t>(draws.next() % static_cast<uint64_t>(num_rows_ - num_own));
    if (number >= low) number += num_own;
    const int64_t begin = in_row(number, 0), count = in_row(number, 1) - begin;
    const int64_t first = begin + static_cast<int64_t>(draws.below(static_cast<uint64_t>(count)));
    const int64_t stop = bounds_.get<int64_t>(std::min(first_above(first), bounds_.size - 1));
    int64_t end = std::min(first + 1, stop);
    for (int64_t size = run_of(first, end).size; end < stop && size < room; ++end) size += lengths_.get<int32_t>(end);
    return run_of(first, end);
  }

  int64_t first_above(int64_t sentence) const {  // the first bound above it
    int64_t low = 0, high = bounds_.size;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (bounds_.get<int64_t>(middle) > sentence) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  int64_t row_at_least(int64_t sentence) const {  // the first row that begins there or after
    int64_t low = 0, high = num_rows_;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (in_row(middle, 0) >= sentence) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  template <class T>
  void append_as(const Run& run, Row& row) const {
    const size_t before = row.tokens.size();
    row.tokens.resize(before + static_cast<size_t>(run.size));
    int32_t* const to = row.tokens.data() + before;
    T low = 0, high = 0;  // because: a comparison with the vocabulary for each of them takes longer than the copy
    for (int64_t i = 0; i < run.size; ++i) {
      const T token = tokens_.get<T>(run.begin + i);
      to[i] = static_cast<int32_t>(token);
      low = std::min(low, token);
      high = std::max(high, token);
    }
    if (low >= 0 && static_cast<int64_t>(high) < kinds_.size) return;
    const auto* const wrong =
        std::find_if(to, to + run.size, [&](int32_t token) { return token < 0 || token >= kinds_.size; });
    throw std::out_of_range("token " + std::to_string(run.begin + (wrong - to)) + " has the id " +
                            std::to_string(*wrong) + ", which is outside the vocabulary");
  }

  void append(const Run& run, Row& row) const {
    if (tokens_.width == 2) append_as<uint16_t>(run, row);
    else append_as<int32_t>(run, row);
  }

  // ---- the mask

  void find_words(Row& row) const {
    row.words.resize(row.tokens.size());
    const int32_t* const token = row.tokens.data();
    Word* const words = row.words.data();
    size_t num = 0;
    const auto add = [&](int32_t begin, int32_t end) {
      for (int32_t i = begin; i < end; ++i) {
        const uint8_t kind = kinds_.get<uint8_t>(token[i]);
        if (kind == kSpecial) continue;
        if (kind == kContinues && num && words[num - 1].end == i) ++words[num - 1].end;
        else words[num++] = {i, i + 1};
      }
    };
    add(1, row.second - 1);
    add(row.second, static_cast<int32_t>(row.tokens.size()) - 1);
    row.words.resize(num);
  }

  void choose(Draws& draws, Row& row) const {
    const auto num_words = static_cast<uint32_t>(row.words.size());
    int64_t budget = static_cast<int64_t>((row.tokens.size() * share_ + (uint64_t{1} << 31)) >> 32);
    budget = std::min(std::max<int64_t>(budget, 1), max_predictions_);
    row.masked.clear();
    row.order.resize(num_words);
    for (uint32_t i = 0; i < num_words; ++i) row.order[i] = i;
    std::fill_n(row.taken.begin(), num_words, uint8_t{0});
    for (uint32_t i = 0; i < num_words && static_cast<int64_t>(row.masked.size()) < budget; ++i) {
      std::swap(row.order[i], row.order[i + draws.below(num_words - i)]);
      const uint32_t first = row.order[i];
      uint32_t last = first;  // of the n-gram
      for (uint32_t more = ngram(draws) - 1; more && last + 1 < num_words; --more, ++last) {
        if (row.words[last + 1].begin != row.words[last].end) break;
      }
      const int64_t room = budget - static_cast<int64_t>(row.masked.size());
      while (last > first && row.words[last].end - row.words[first].begin > room) --last;
      if (row.words[last].end - row.words[first].begin > room) continue;
      if (std::count(row.taken.begin() + first, row.taken.begin() + last + 1, 1)) continue;
      std::fill(row.taken.begin() + first, row.taken.begin() + last + 1, uint8_t{1});
      for (int32_t place = row.words[first].begin; place < row.words[last].end; ++place) row.masked.push_back(place);
    }
  }

  uint32_t ngram(Draws& draws) const {
    if (ngram_thresholds_.empty()) return 1;
    const uint64_t drawn = draws.next() >> 32;
    uint32_t n = 1;
    for (const uint64_t threshold : ngram_thresholds_) n += drawn >= threshold;
    return n;
  }

  int64_t replaced(const Row& row, int32_t place) const {
    const uint64_t drawn = lmtrain::draw_at(row.mask_key, static_cast<uint64_t>(place));
    const auto lot = static_cast<uint32_t>(drawn >> 32);
    if (lot < kMask) return mask_;
    if (lot >= kRandom) return row.tokens[static_cast<size_t>(place)];
    uint64_t token = ((drawn & 0xFFFFFFFFu) * (static_cast<uint64_t>(kinds_.size) - specials_.size())) >> 32;
    for (const uint64_t special : specials_) token += token >= special;  // they are sorted
    return static_cast<int64_t>(token);
  }

  Flat tokens_, lengths_, pointers_, bounds_, rows_, kinds_;
  std::vector<uint64_t> specials_;
  int32_t cls_, sep_, mask_, pad_;
  int64_t seq_len_, num_rows_;
  int pairs_;
  uint64_t share_;
  int64_t max_predictions_;
  std::vector<uint64_t> ngram_thresholds_;
  uint64_t seed_;
};

}  // namespace

void bind_masked(py::module_& module) {
  py::class_<MaskedSampler>(module, "MaskedSampler", "BERT's samples of a dataset of sentences.")
      .def(py::init<const py::array&, const py::array&, const py::array&, const py::array&, const py::array&,
                    const py::array&, const std::vector<uint64_t>&, int32_t, int32_t, int32_t, int32_t, int64_t, int,
                    uint64_t, int64_t, const std::vector<uint64_t>&, uint64_t>(),
           py::kw_only(), py::arg("tokens"), py::arg("lengths"), py::arg("pointers"), py::arg("bounds"),
           py::arg("rows"), py::arg("kinds"), py::arg("specials"), py::arg("cls"), py::arg("sep"), py::arg("mask"),
           py::arg("pad"), py::arg("seq_len"), py::arg("pairs"), py::arg("share"), py::arg("max_predictions"),
           py::arg("ngram_thresholds"), py::arg("seed"))
      .def("batch", &MaskedSampler::batch, py::arg("ids"))
      .def("runs", &MaskedSampler::runs, py::arg("ids"))
      .def("counts", &MaskedSampler::counts, py::arg("ids"));
}
