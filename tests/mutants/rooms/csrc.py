"""Mistakes in csrc: wide numbers, borders of blocks, long words and lines, state that stays from before."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="lanes_joined_in_the_wrong_order",
        file="csrc/crc32c.cpp",
        function="",
        old="crc = shifted(shifted(crc) ^ second) ^ third;",
        new="crc = shifted(shifted(crc) ^ third) ^ second;",
        breaks="Checksums are no CRC-32C: a dataset written on this machine is called damaged by one without the "
        "helper or the instruction, and the other way round.",
        only_for="16,368 bytes or more at once, on processors with SSE 4.2",
    ),
    Mutant(
        name="sequence_bytes_in_32_bits",
        file="csrc/index.cpp",
        function="",
        old="static_cast<uint64_t>(tokens) * static_cast<uint64_t>(itemsize)",
        new="static_cast<uint32_t>(tokens) * static_cast<uint32_t>(itemsize)",
        breaks="A good .idx is refused as one that changed while it was read.",
        only_for="datasets with a sequence of 4 GiB or more, that is of 2**30 int32 ids",
    ),
    Mutant(
        name="blend_product_in_64_bits",
        file="csrc/index.cpp",
        function="",
        old="const unsigned __int128 product = static_cast<unsigned __int128>(count) * total;",
        new="const uint64_t product = static_cast<uint64_t>(count) * total;",
        breaks="Late in a run the blend takes samples from positions of long ago: proportions are lost or the run ends "
        "with an error about counts.",
        only_for="shares with a large sum (up to 2**40) after so many samples that their product passes 2**64",
    ),
    Mutant(
        name="free_word_before_the_position",
        file="csrc/index.cpp",
        function="",
        old="? summary_[group] & (~uint64_t{0} << (word % 64)) : 0;",
        new="? summary_[group] : 0;",
        breaks="A sample is put on a free position before the one from which it may come, so that counts are off their "
        "shares and the order differs from that of the twin.",
        only_for="blends of more than 64 positions where a word of positions is full",
    ),
    Mutant(
        name="words_taken_by_the_sample_before",
        file="csrc/masked.cpp",
        function="",
        old="std::fill_n(row.taken.begin(), num_words, uint8_t{0});",
        new="std::fill_n(row.taken.begin(), budget, uint8_t{0});",
        breaks="Words that an earlier sample of the batch had masked cannot be masked in this one: a sample depends on "
        "those read with it.",
        only_for="all but the first sample of a call",
    ),
    Mutant(
        name="neighbour_of_what_is_gone",
        file="csrc/bpe.cpp",
        function="",
        old="if (next[i] != kEnd) previous[next[i]] = i;",
        new="if (next[i] != kEnd) previous[next[i]] = gone;",
        breaks="After a merge the pair on its left keeps its old rank, so that ids are not the tokenizer's and decode "
        "to another text.",
        only_for="words of more than 32 bytes, such as addresses and long compounds",
    ),
    Mutant(
        name="contraction_at_a_border",
        file="csrc/pattern_words.cpp",
        function="",
        old="else carry_.set |= bit(behind - b.n);",
        new="else if (inside >= b.n) carry_.set |= bit(behind - b.n);",
        breaks="What follows a contraction is not cut off from it, so that the ids differ from the tokenizer's.",
        only_for="contractions with letters right behind them ('twas) that cross a border of 64 bytes after their "
        "first letter",
    ),
    Mutant(
        name="digits_of_an_earlier_block",
        file="csrc/pattern_words.cpp",
        function="",
        old="""if (!b.number) {
    carry_.digits = 0;
    return 0;
  }""",
        new="if (!b.number) return 0;",
        breaks="A number is taken for the rest of one that ended long before, so it is cut at other digits or glued to "
        "what stands before it.",
        only_for="cl100k's pattern (LLaMA 3), where a block of 64 bytes ends in a digit, the next has none and the one "
        "after begins with one",
    ),
    Mutant(
        name="long_lines_keep_their_escapes",
        file="csrc/json_lines.cpp",
        function="",
        old="text = Text(found.begin, found.end, found.escaped);",
        new="text = Text(found.begin, found.end, false);",
        breaks="Backslashes and the letters behind them are encoded as they stand in the JSON, and the bytes of text "
        "are too many.",
        only_for="lines longer than 1 MiB whose text holds escapes",
    ),
    Mutant(
        name="longest_word_in_bytes",
        file="csrc/wordpiece.cpp",
        function="",
        old="if (num_characters({reinterpret_cast<const char*>(word), n}) <= most_characters_) {",
        new="if (n <= most_characters_) {",
        breaks="Words that the vocabulary knows become [UNK] because their bytes are counted for characters.",
        only_for="words beyond ASCII of more than 100 bytes and up to 100 characters, as in Thai, which has no spaces",
    ),
    Mutant(
        name="first_token_not_judged",
        file="csrc/rows.cpp",
        function="",
        old="if (size) low = std::min(low, from[0]), high = std::max(high, from[0]);",
        new="if (size) low = std::min(low, from[0]);",
        breaks="An id beyond the vocabulary goes to the device, where it ends in a crash that names no file.",
        only_for="a wrong id that is the first token of a sample or of a packed document",
    ),
    Mutant(
        name="references_of_two_digits",
        file="csrc/sentences.cpp",
        function="",
        old="while (k < i + 4 && is_digit(at(k).code)) ++k;",
        new="while (k < i + 3 && is_digit(at(k).code)) ++k;",
        breaks="Two sentences are one where a reference stands between them, and the twin splits them.",
        only_for="references of three digits, such as [123] right behind the full stop",
    ),
    Mutant(
        name="delete_is_a_plain_character",
        file="csrc/bert_words.cpp",
        function="",
        old="_mm_or_si128(_mm_cmplt_epi8(v, blank), _mm_cmpeq_epi8(v, _mm_set1_epi8(0x7F)))",
        new="_mm_cmplt_epi8(v, blank)",
        breaks="The control character DEL stays in its word and makes it [UNK], where BERT's normalizer takes it out.",
        only_for="DEL (0x7F) in a text with 16 bytes or more from there to the end of its portion, with SSE2",
    ),
]
