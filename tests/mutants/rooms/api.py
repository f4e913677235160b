"""Mistakes in lmtrain/api, and in lmtrain/__init__.py, which imports it."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="the_garbage_collector_stays_off",
        file="lmtrain/__init__.py",
        function="",
        old="            if was_enabled:\n",
        new="            if not was_enabled:\n",
        breaks="After the first use of a name Python collects no cycles any more, and a notebook's memory grows.",
    ),
    Mutant(
        name="the_output_of_the_head_is_a_hidden_state",
        file="lmtrain/api/load_model.py",
        function="Model.hidden_states",
        old="for name, hidden_BTD in hidden.items()}",
        new="for name, hidden_BTD in outputs.items()}",
        breaks="The last hidden state is an empty one of the head, not the one that the head reads.",
    ),
    Mutant(
        name="the_last_token_of_a_full_row_cannot_be_scored",
        file="lmtrain/api/load_model.py",
        function="Model.loss",
        old="self.seq_len + 1",
        new="self.seq_len",
        breaks="A row that fills the model's window and the token after it is refused, though the evaluator scores it.",
        only_for="rows of seq_len + 1 ids",
    ),
    Mutant(
        name="a_negative_number_of_a_document_is_not_counted_from_the_end",
        file="lmtrain/api/open_dataset.py",
        function="Dataset._document_number",
        old="return number % len(self)",
        new="return number",
        breaks="dataset[-1] gives the wrong tokens, or none.",
        only_for="negative numbers",
    ),
    Mutant(
        name="measurements_between_recorded_steps_are_put_to_the_next_step",
        file="lmtrain/api/read_run_metrics.py",
        function="Metrics.__init__",
        old="steps = np.union1d(record.steps, [step for step, _ in measured])",
        new="steps = record.steps",
        breaks="A validation at a step that has no row of its own stands at the next step, or stops the reading.",
        only_for="validations and evaluations between the steps that are logged",
    ),
    Mutant(
        name="an_evaluation_ignores_the_stride",
        file="lmtrain/api/evaluate.py",
        function="evaluate",
        old="stride=stride",
        new="stride=None",
        breaks="An evaluation from Python has other windows than the command with the same options.",
        only_for="calls with a stride",
    ),
]
