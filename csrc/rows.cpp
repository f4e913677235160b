// Rows of a batch: tokens and labels out of a .bin, and where their documents begin.
// Twins: causal_language_samples.py and packing.py in lmtrain/data/samples.

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "bind.h"

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

constexpr int64_t kIgnored = -100;

// Positions and document numbers of `num` rows of `seq_len` tokens; `firsts`, ascending, are the places, counted
// through all rows, at which a row or a document begins.
py::tuple separate(const Array<int64_t>& firsts, int64_t num, int64_t seq_len) {
  const int64_t count = firsts.size();
  const int64_t* first = firsts.data();
  if (num < 0 || seq_len < 1 || num > (int64_t{1} << 40) / seq_len) throw std::invalid_argument("a wrong size");
  const int64_t size = num * seq_len;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t before = i ? first[i - 1] : -1;
    if (first[i] <= before || first[i] >= size) throw std::invalid_argument("the places do not rise within the rows");
  }
  if (size && (count == 0 || first[0] != 0)) throw std::invalid_argument("the first row has no beginning");
  py::array_t<int64_t> positions({num, seq_len});
  py::array_t<int32_t> documents({num, seq_len});
  int64_t* position = positions.mutable_data();
  int32_t* document = documents.mutable_data();
  {
    py::gil_scoped_release release;
    int32_t number = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t end = i + 1 < count ? first[i + 1] : size;
      number = first[i] % seq_len ? number + 1 : 0;
      for (int64_t at = first[i]; at < end; ++at) {
        position[at] = at - first[i];
        document[at] = number;
      }
    }
  }
  return py::make_tuple(positions, documents);
}

// Tokens from[0..size) to `id`, the token after each to `label`. False where one is not in 0..vocab_size.
template <typename T>
bool copy_piece(const T* from, int64_t size, int64_t vocab_size, int64_t* id, int64_t* label) {
  T low = 0, high = 0;  // because: in 64 bits the loop takes twice as long
  for (int64_t i = 0; i < size; ++i) {
    const T value = from[i + 1];
    id[i] = static_cast<int64_t>(from[i]);
    label[i] = static_cast<int64_t>(value);
    low = std::min(low, value);
    high = std::max(high, value);
  }
  if (size) low = std::min(low, from[0]), high = std::max(high, from[0]);
  return low >= 0 && static_cast<int64_t>(high) < vocab_size;
}

// `copy` of the first token, as a pointer to the file's type.
template <typename Copy>
bool of_type(const py::array& tokens, Copy copy) {
  if (tokens.ndim() != 1 || !(tokens.flags() & py::array::c_style) ||
      reinterpret_cast<uintptr_t>(tokens.data()) % static_cast<size_t>(tokens.itemsize())) {
    throw std::invalid_argument("the arrays do not belong together");
  }
  const void* const from = tokens.data();
  const char kind = tokens.dtype().kind();
  const py::ssize_t width = tokens.itemsize();
  py::gil_scoped_release release;
  if (kind == 'u' && width == 2) return copy(static_cast<const uint16_t*>(from));
  if (kind == 'i' && width == 4) return copy(static_cast<const int32_t*>(from));
  if (kind == 'u' && width == 1) return copy(static_cast<const uint8_t*>(from));
  if (kind == 'i' && width == 1) return copy(static_cast<const int8_t*>(from));
  if (kind == 'i' && width == 2) return copy(static_cast<const int16_t*>(from));
  if (kind == 'i' && width == 8) return copy(static_cast<const int64_t*>(from));
  throw std::invalid_argument("no type of a token file");
}

// Rows of which some places stay empty: sizes[p] tokens from starts[p] on at place targets[p], counted through all rows,
// and the token after each as its label; 0 and kIgnored elsewhere. (tokens, labels, whether all are in 0..vocab_size).
py::tuple pack_rows(const py::array& tokens, const Array<int64_t>& starts, const Array<int64_t>& sizes,
                    const Array<int64_t>& targets, int64_t num, int64_t seq_len, int64_t vocab_size) {
  const int64_t count = starts.size(), num_tokens = tokens.size();
  const int64_t *start = starts.data(), *size = sizes.data(), *target = targets.data();
  if (sizes.size() != count || targets.size() != count) throw std::invalid_argument("the arrays do not belong together");
  if (num < 0 || seq_len < 1 || num > (int64_t{1} << 40) / seq_len) throw std::invalid_argument("a wrong size");
  int64_t end = 0;
  for (int64_t p = 0; p < count; ++p) {
    if (start[p] < 0 || size[p] < 0 || target[p] < end || size[p] >= num_tokens - start[p] ||
        size[p] > num * seq_len - target[p]) {
      throw std::invalid_argument("a piece lies outside the tokens or the rows");
    }
    end = target[p] + size[p];
  }
  Array<int64_t> ids({num, seq_len}), labels({num, seq_len});
  int64_t *id = ids.mutable_data(), *label = labels.mutable_data();
  const bool known = of_type(tokens, [&](const auto* from) {
    bool known = true;
    int64_t at = 0;
    const auto leave = [&](int64_t stop) {
      std::fill(id + at, id + stop, 0);
      std::fill(label + at, label + stop, kIgnored);
    };
    for (int64_t p = 0; p < count; ++p) {
      leave(target[p]);
      known &= copy_piece(from + start[p], size[p], vocab_size, id + target[p], label + target[p]);
      at = target[p] + size[p];
    }
    leave(num * seq_len);
    return known;
  });
  return py::make_tuple(ids, labels, known);
}

// Samples of tokens that lie end to end, cut every `seq_len`: (tokens, labels, whether all are in 0..vocab_size).
py::tuple read_rows(const py::array& tokens, const Array<int64_t>& sample_ids, int64_t seq_len, int64_t vocab_size) {
  const int64_t num = sample_ids.size(), *sample = sample_ids.data();
  if (sample_ids.ndim() != 1 || seq_len < 1) throw std::invalid_argument("a wrong size");
  const int64_t num_samples = (tokens.size() - 1) / seq_len;
  for (int64_t i = 0; i < num; ++i) {
    if (sample[i] < 0 || sample[i] >= num_samples) throw std::out_of_range("a sample lies outside the dataset");
  }
  Array<int64_t> ids({num, seq_len}), labels({num, seq_len});
  int64_t *id = ids.mutable_data(), *label = labels.mutable_data();
  const bool known = of_type(tokens, [&](const auto* from) {
    bool known = true;
    for (int64_t i = 0; i < num; ++i) {
      known &= copy_piece(from + sample[i] * seq_len, seq_len, vocab_size, id + i * seq_len, label + i * seq_len);
    }
    return known;
  });
  return py::make_tuple(ids, labels, known);
}

// The same of runs of tokens, sizes[r] from starts[r] on, that end to end are `num` rows of seq_len + 1.
py::tuple read_runs(const py::array& tokens, const Array<int64_t>& starts, const Array<int64_t>& sizes, int64_t num,
                    int64_t seq_len, int64_t vocab_size) {
  const int64_t count = starts.size(), *start = starts.data(), *size = sizes.data();
  if (sizes.size() != count || num < 0 || seq_len < 1 || num > (int64_t{1} << 40) / seq_len) {
    throw std::invalid_argument("a wrong size");
  }
  int64_t left = num * (seq_len + 1);
  for (int64_t r = 0; r < count; ++r) {
    if (start[r] < 0 || size[r] < 0 || size[r] > tokens.size() - start[r] || size[r] > left) {
      throw std::invalid_argument("the token runs leave the dataset, or do not fill the rows exactly");
    }
    left -= size[r];
  }
  if (left) throw std::invalid_argument("the runs do not fill the rows");
  Array<int64_t> ids({num, seq_len}), labels({num, seq_len});
  int64_t *id = ids.mutable_data(), *label = labels.mutable_data();
  const bool known = of_type(tokens, [&](const auto* from) {
    bool known = true;
    int64_t place = 0;  // in a row, which `id` and `label` are
    for (int64_t r = 0; r < count; ++r) {
      const auto *token = from + start[r], *const end = token + size[r];
      while (token < end) {
        const int64_t now = std::min<int64_t>(end - token, seq_len + 1 - place);
        known &= copy_piece(token, now - 1, vocab_size, id + place, label + place);
        known &= static_cast<int64_t>(*token) >= 0 && static_cast<int64_t>(*token) < vocab_size;  // if it is alone
        if (place) label[place - 1] = static_cast<int64_t>(*token);
        token += now;
        place += now;
        if (place <= seq_len) {
          id[place - 1] = static_cast<int64_t>(token[-1]);
        } else {
          place = 0;
          id += seq_len;
          label += seq_len;
        }
      }
    }
    return known;
  });
  return py::make_tuple(ids, labels, known);
}

}  // namespace

void bind_rows(py::module_& module) {
  module.def("separate", &separate, py::arg("firsts"), py::arg("num"), py::arg("seq_len"),
             "Positions and document numbers of rows.");
  module.def("pack_rows", &pack_rows, py::arg("tokens"), py::arg("starts"), py::arg("sizes"), py::arg("targets"),
             py::arg("num"), py::arg("seq_len"), py::arg("vocab_size"), "Rows with pieces of tokens in them, likewise.");
  module.def("read_runs", &read_runs, py::arg("tokens"), py::arg("starts"), py::arg("sizes"), py::arg("num"),
             py::arg("seq_len"), py::arg("vocab_size"), "Rows put together from runs of tokens, in the same form.");
  module.def("read_rows", &read_rows, py::arg("tokens"), py::arg("sample_ids"), py::arg("seq_len"),
             py::arg("vocab_size"), "Rows cut from tokens end to end, their labels, and whether all ids are known.");
}
