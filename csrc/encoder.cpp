#include "encoder.h"

#include "utf8.h"

template <class Id>
class Encoder<Id>::Borrowed {
 public:
  explicit Borrowed(Encoder& owner) : owner_(owner) {
    const std::lock_guard<std::mutex> lock(owner_.mutex_);
    if (owner_.idle_.empty()) {
      worker_ = std::make_unique<Worker>(*owner_.model_);
    } else {
      worker_ = std::move(owner_.idle_.back());
      owner_.idle_.pop_back();
    }
  }
  ~Borrowed() {
    const std::lock_guard<std::mutex> lock(owner_.mutex_);
    owner_.idle_.push_back(std::move(worker_));
  }
  Worker& operator*() { return *worker_; }

 private:
  Encoder& owner_;
  std::unique_ptr<Worker> worker_;
};

template <class Id>
void Encoder<Id>::encode_jsonl(json_lines::Span data, std::string_view key, int64_t eod, Encoded<Id>& out) {
  Borrowed worker(*this);
  json_lines::Span line;
  for (const uint8_t* p = data.begin; json_lines::next_line(p, data.end, line);) {
    Text text;
    if (json_lines::find_text(line, key, (*worker).line, text) && encode(*worker, text, eod, out)) continue;
    out.bad.push_back(line.begin - data.begin);
    out.bad.push_back(line.end - data.begin);
  }
}

template <class Id>
void Encoder<Id>::encode_documents(const std::vector<json_lines::Span>& documents, int64_t eod, Encoded<Id>& out) {
  Borrowed worker(*this);
  int64_t number = 0;
  for (const json_lines::Span& document : documents) {
    const bool good = utf8::is_valid(document.begin, document.end) &&
                      encode(*worker, Text(document.begin, document.end, false), eod, out);
    if (!good) out.bad.insert(out.bad.end(), 2, number);
    ++number;
  }
}

template <class Id>
bool Encoder<Id>::encode(Worker& worker, Text text, int64_t eod, Encoded<Id>& out) {
  if (json_lines::has_long_word(text)) return false;
  const size_t before = out.ids.size();
  Words words;
  worker.cutter->begin(text);
  while (worker.cutter->next(words)) worker.cache.encode(words, out.ids);
  if (eod != kNoEod && out.ids.size() > before) {  // because: an empty document stays empty in this format
    Id* end = out.ids.reserve(1);
    *end++ = static_cast<Id>(eod);
    out.ids.set_end(end);
  }
  out.lengths.push_back(static_cast<int64_t>(out.ids.size() - before));
  out.num_text_bytes += static_cast<int64_t>(worker.cutter->num_text_bytes());
  return true;
}

template class Encoder<uint16_t>;
template class Encoder<int32_t>;
