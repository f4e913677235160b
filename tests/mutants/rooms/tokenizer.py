"""Mistakes in lmtrain/tokenizer: what decides ids, which encoder is trusted with them, and what is counted."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="any_file_is_the_recorded_tokenizer",
        file="lmtrain/tokenizer/text_to_ids_and_back.py",
        function="Tokenizer.load_lazily",
        old=" or hashlib.sha256(data := _read(path)).hexdigest() != sha256:",
        new=" or not (data := _read(path)):",
        breaks="Another tokenizer in the place of a dataset's own is taken for it, and goes into every checkpoint.",
        only_for="datasets whose tokenizer.json was replaced or damaged",
    ),
    Mutant(
        name="last_name_of_a_role_wins",
        file="lmtrain/tokenizer/text_to_ids_and_back.py",
        function="Tokenizer.special",
        old="special[role] = ids[0]",
        new="special[role] = ids[-1]",
        breaks="Documents end with another token than the one that the model's family ends them with.",
        only_for="vocabularies with two names of one role, such as <|endoftext|> and </s>",
    ),
    Mutant(
        name="vocabulary_counted_without_gaps",
        file="lmtrain/tokenizer/vocabulary_files.py",
        function="_check_ids",
        old="return int(max(ids)) + 1",
        new="return len(ids)",
        breaks="The embedding has fewer rows than ids need, and good datasets are refused as of another tokenizer.",
        only_for="vocabularies whose ids have gaps",
    ),
    Mutant(
        name="letters_of_different_words",
        file="lmtrain/tokenizer/train.py",
        function="_choose_alphabet",
        old="letters[letter] += count",
        new="letters[letter] += 1",
        breaks="Letters are ranked by how many different words they stand in, so that common ones of few words are "
        "left out of the vocabulary and become [UNK].",
        only_for="texts with more different characters than 1000 or half of the vocabulary's room",
    ),
]
