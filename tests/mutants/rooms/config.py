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
]
