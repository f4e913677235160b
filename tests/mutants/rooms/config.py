"""Planted mistakes in lmtrain/config: groups, fractions, sweeps."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="what_a_group_says_hides_what_its_field_says",
        file="lmtrain/config/settings_base.py",
        function="facts_of",
        old="[*(cls.field_facts for cls, _ in owners), *of_fields, *inner]",
        new="[*of_fields, *(cls.field_facts for cls, _ in owners), *inner]",
        breaks="A stage may set data.first_sample and data.text, which are of the run as a whole, since it may set the "
        "other settings of data.",
        only_for="settings whose fields state another fact than their class",
    ),
    Mutant(
        name="fractions_cut_to_whole_numbers",
        file="lmtrain/config/build_typed_settings.py",
        function="_to_scalar",
        old="not (isinstance(value, float) and value.is_integer() is False):",
        new="not (isinstance(value, float) and not math.isfinite(value)):",
        breaks="A fraction is cut to a whole number without a word where it was to be refused.",
        only_for="fractions for settings that are whole numbers, such as train.global_batch=2.5",
    ),
    Mutant(
        name="plus_lost_in_a_sweep",
        file="lmtrain/config/compose_run_settings.py",
        function="expand_sweep",
        old="key, value = override.get_key_element(), override.value()",
        new="key, value = override.key_or_group, override.value()",
        breaks="Every run of the sweep is refused, and told to write what the user has written.",
        only_for="-m with +group=glob(...) over a group that no defaults list names",
    ),
]
