// Encoder, and the reading of JSON lines, for Python. Called by bulk_encoding.py and text_from_json_lines.py.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <unordered_map>
#include <vector>

#include "bert_words.h"
#include "bind.h"
#include "bpe.h"
#include "encoder.h"
#include "wordpiece.h"

namespace {

using json_lines::Span;

Span span_of(const Py_buffer& view) {
  const auto* begin = static_cast<const uint8_t*>(view.buf);
  return {begin, begin + view.len};
}

// The bytes of any object with a plain buffer, held until the end of the scope.
class Buffer {
 public:
  explicit Buffer(const py::object& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { PyBuffer_Release(&view_); }
  Span span() const { return span_of(view_); }

 private:
  Py_buffer view_;
};

py::array_t<int64_t> array_of(const std::vector<int64_t>& values) {
  return py::array_t<int64_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

template <class Id>
py::tuple result_of(Encoded<Id>& encoded) {
  const auto size = static_cast<py::ssize_t>(encoded.ids.size());
  Id* ids = encoded.ids.release();
  const py::capsule owner(ids, [](void* data) { std::free(data); });
  return py::make_tuple(py::array_t<Id>(size, ids, owner), array_of(encoded.lengths), encoded.num_text_bytes,
                        array_of(encoded.bad));
}

template <class Id>
py::tuple encode_jsonl(Encoder<Id>& encoder, const py::object& data, const std::string& key, int64_t eod) {
  const Buffer buffer(data);
  Encoded<Id> out;
  {
    const py::gil_scoped_release release;
    encoder.encode_jsonl(buffer.span(), key, eod, out);
  }
  return result_of(out);
}

// The bytes of a str or bytes; nothing for a str that holds half of a surrogate pair.
bool bytes_of(const py::handle& document, Span& span) {
  const char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyUnicode_Check(document.ptr())) {
    data = PyUnicode_AsUTF8AndSize(document.ptr(), &size);
    if (data == nullptr) PyErr_Clear();
  } else if (PyBytes_AsStringAndSize(document.ptr(), const_cast<char**>(&data), &size) != 0) {
    throw py::error_already_set();
  }
  span = {reinterpret_cast<const uint8_t*>(data), reinterpret_cast<const uint8_t*>(data) + size};
  return data != nullptr;
}

template <class Id>
py::tuple encode_documents(Encoder<Id>& encoder, const py::sequence& documents, int64_t eod) {
  static constexpr uint8_t kNoText[] = {0xFF};
  const py::tuple held(documents);  // because: a list might be changed while the lock is released
  std::vector<Span> spans;
  for (const py::handle document : held) {
    Span span;
    if (!bytes_of(document, span)) span = {kNoText, kNoText + 1};
    spans.push_back(span);
  }
  Encoded<Id> out;
  {
    const py::gil_scoped_release release;
    encoder.encode_documents(spans, eod, out);
  }
  return result_of(out);
}

py::tuple read_jsonl(const py::object& data, const std::string& key) {
  const Buffer buffer(data);
  const Span span = buffer.span();
  std::vector<int64_t> starts, bad;
  std::vector<uint8_t> room;
  py::list documents;
  Span line;
  for (const uint8_t* p = span.begin; json_lines::next_line(p, span.end, line);) {
    Text text;
    if (json_lines::find_text(line, key, room, text) && !json_lines::has_long_word(text)) {
      std::vector<uint8_t> bytes(text.most_bytes() + Text::kMinRoom + Text::kSlack);
      const size_t size = text.read(bytes.data(), bytes.size() - Text::kSlack);
      documents.append(py::bytes(reinterpret_cast<const char*>(bytes.data()), size));
      starts.push_back(line.begin - span.begin);
    } else {
      bad.push_back(line.begin - span.begin);
      bad.push_back(line.end - span.begin);
    }
  }
  return py::make_tuple(documents, array_of(starts), array_of(bad));
}

using Table = py::array_t<int64_t, py::array::c_style>;

std::unique_ptr<Model> make_bpe(const std::string& pattern, const Table& byte_ids, const Table& merges,
                                std::unordered_map<std::string, uint32_t> whole) {
  if (byte_ids.size() != 256 || merges.size() % 3 != 0) throw std::invalid_argument("256 byte ids and merges of three");
  if (pattern != "gpt2" && pattern != "cl100k") throw std::invalid_argument("the patterns are gpt2 and cl100k");
  const auto id = [](int64_t value) {
    if (value < 0 || value >= Bpe::kMostIds) throw std::invalid_argument("an id is out of range");
    return static_cast<uint32_t>(value);
  };
  std::array<uint32_t, 256> bytes;
  for (size_t i = 0; i < 256; ++i) bytes[i] = id(byte_ids.data()[i]);
  std::vector<Merge> rows;
  for (const int64_t* row = merges.data(); row < merges.data() + merges.size(); row += 3) {
    rows.push_back({id(row[0]), id(row[1]), id(row[2])});
  }
  return std::make_unique<Bpe>(pattern == "gpt2" ? Pattern::kGpt2 : Pattern::kCl100k, bytes, rows, std::move(whole));
}

std::unique_ptr<Model> make_wordpiece(const std::unordered_map<std::string, uint32_t>& vocab, const std::string& unknown,
                                      const std::string& prefix, size_t most_characters, bool clean, bool cjk, bool strip,
                                      bool lower) {
  auto rules = std::make_shared<const BertRules>(clean, cjk, strip, lower);
  return std::make_unique<Wordpiece>(std::move(rules), vocab, unknown, prefix, most_characters);
}

template <class Id>
void bind_encoder_of(py::module_& module, const char* name) {
  py::class_<Encoder<Id>>(module, name, "Texts to ids; see lmtrain/tokenizer/bulk_encoding.py.")
      .def_static("bpe",
                  [](const std::string& pattern, const Table& byte_ids, const Table& merges,
                     std::unordered_map<std::string, uint32_t> whole) {
                    return std::make_unique<Encoder<Id>>(make_bpe(pattern, byte_ids, merges, std::move(whole)));
                  },
                  py::arg("pattern"), py::arg("byte_ids"), py::arg("merges"), py::arg("whole"))
      .def_static("wordpiece",
                  [](const std::unordered_map<std::string, uint32_t>& vocab, const std::string& unknown,
                     const std::string& prefix, size_t most_characters, bool clean, bool cjk, bool strip, bool lower) {
                    return std::make_unique<Encoder<Id>>(
                        make_wordpiece(vocab, unknown, prefix, most_characters, clean, cjk, strip, lower));
                  },
                  py::arg("vocab"), py::arg("unknown"), py::arg("prefix"), py::arg("most_characters"), py::arg("clean"),
                  py::arg("cjk"), py::arg("strip"), py::arg("lower"))
      .def("encode_jsonl", &encode_jsonl<Id>, py::arg("data"), py::arg("key"), py::arg("eod"),
           "ids, lengths, text bytes, and where each bad line begins and ends.")
      .def("encode_documents", &encode_documents<Id>, py::arg("documents"), py::arg("eod"),
           "ids, lengths, text bytes, and the number of each bad document, twice.");
}

}  // namespace

void bind_encoder(py::module_& module) {
  bind_encoder_of<uint16_t>(module, "Encoder16");
  bind_encoder_of<int32_t>(module, "Encoder32");
  module.def("read_jsonl", &read_jsonl, py::arg("data"), py::arg("key"),
             "The texts under a key, where their lines begin, and where each bad line begins and ends.");
}
