// Slices of JSON lines, or documents, to ids. Knows no Python; bind_encoder.cpp hands it over.
// Twin: TwinEncoder in lmtrain/tokenizer/bulk_encoding.py.
#pragma once

#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "json_lines.h"
#include "model.h"
#include "word_cache.h"

// What became of a slice or of a list of documents.
template <class Id>
struct Encoded {
  IdBuffer<Id> ids;
  std::vector<int64_t> lengths;  // of the good documents
  int64_t num_text_bytes = 0;
  std::vector<int64_t> bad;  // where bad lines begin and end in the slice; or a bad document's number, twice
};

// Several threads may use one at a time; each call borrows a worker, which remembers words from call to call.
template <class Id>
class Encoder {
 public:
  static constexpr int64_t kNoEod = -1;

  explicit Encoder(std::unique_ptr<Model> model) : model_(std::move(model)) {}

  // `eod` ends every document that has ids.
  void encode_jsonl(json_lines::Span data, std::string_view key, int64_t eod, Encoded<Id>& out);
  void encode_documents(const std::vector<json_lines::Span>& documents, int64_t eod, Encoded<Id>& out);

 private:
  struct Worker {
    explicit Worker(const Model& model) : cutter(model.make_cutter()), cache(model) {}
    std::unique_ptr<Cutter> cutter;
    WordCache<Id> cache;
    std::vector<uint8_t> line;  // the text of one
  };
  class Borrowed;

  static bool encode(Worker& worker, Text text, int64_t eod, Encoded<Id>& out);

  std::unique_ptr<Model> model_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> idle_;
};
