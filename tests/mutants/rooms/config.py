"""Planted mistakes in lmtrain/config: composing, overrides, references, origins."""

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
        name="inner_mapping_replaced_and_not_added_to",
        file="lmtrain/config/parse_and_apply_overrides.py",
        function="_merged",
        old="return old | {key: _merged(old.get(key), value) for key, value in new.items()}",
        new="return old | new",
        breaks="An override that names one entry of a mapping within a mapping drops the other entries without a word.",
        only_for="overrides of two or more levels in braces, as in hardware={peak_tflops: {bf16: 300}}",
    ),
    Mutant(
        name="dollar_is_left_to_the_shell",
        file="lmtrain/errors.py",
        function="shell_quoted",
        old=r"""re.search(r'["$`\\!]', word)""",
        new=r"""re.search(r'["`\\!]', word)""",
        breaks="The sbatch file hands ${other.key} or a $ in a path to bash, which puts a variable or nothing in its "
        "place: another setting, another folder.",
        only_for="words with a $ in them and none of the other signs, in sbatch files and in words to be typed",
    ),
    Mutant(
        name="relative_reference_read_from_afar",
        file="lmtrain/config/setting_references.py",
        function="_Resolver.look_up",
        old="return self.resolve_subtree(node, target, (*chain, name))",
        new="return self.resolve_subtree(node, path, (*chain, name))",
        breaks="${.key} in a value that another one refers to means a neighbour of the one that refers, so that it "
        "gets a wrong number or is refused.",
        only_for="references to values that hold relative references themselves",
    ),
    Mutant(
        name="mark_of_byte_order_hides_the_header",
        file="lmtrain/config/strict_yaml.py",
        function="_read_text",
        old='data.decode("utf-8-sig")',
        new='data.decode("utf-8")',
        breaks="The line `# @package _global_` is not seen: an experiment is refused for lacking what its first line "
        "says, and other files' keys go into their group.",
        only_for="files that begin with a byte order mark, as some editors on Windows write them",
    ),
    Mutant(
        name="keys_of_longer_names_lose_their_origin",
        file="lmtrain/config/setting_origins.py",
        function="Origins.remove",
        old='other.startswith(f"{key}.")',
        new="other.startswith(key)",
        breaks="`lmtrain config explain` says that nobody has set a key that a file sets.",
        only_for="keys whose names begin with the whole of one that is set later, such as model.norm_eps behind "
        "model.norm=rmsnorm",
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
        name="groups_within_groups_not_found",
        file="lmtrain/config/compose_run_settings.py",
        function="group_choices",
        old='root.glob("*/**/*.yaml")',
        new='root.glob("*/*.yaml")',
        breaks="A file that lies deeper is said not to be there, is not listed and cannot be chosen.",
        only_for="folders of a user's own configs that have groups within groups",
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
    Mutant(
        name="choices_of_no_group",
        file="lmtrain/config/compose_run_settings.py",
        function="expand_sweep",
        old='f"Choices are {join_few(choices)}."',
        new='f"Choices are {join_few(groups)}."',
        breaks="A sweep whose glob() matches nothing is answered with names of groups, which cannot be chosen there.",
        only_for="-m with a glob() that matches no file",
    ),
    Mutant(
        name="lines_counted_from_zero",
        file="lmtrain/config/strict_yaml.py",
        function="_Loader.compose_node",
        old="{event.start_mark.line + 1}",
        new="{event.start_mark.line}",
        breaks="The message about a tag, an alias or too many values names the line before the wrong one.",
        only_for="YAML files with tags, or with too many or too deeply nested values",
    ),
    Mutant(
        name="owner_on_a_hub_is_part_of_the_name",
        file="lmtrain/config/name_suggestions.py",
        function="closest_value",
        old='spellings = (value, value.rpartition("/")[2].lower())',
        new="spellings = (value, value.lower())",
        breaks="model=meta-llama/Llama-3.2-1B is answered with how to list 77 models, and not with llama3.2_1b.",
        only_for="names with an owner, as Hugging Face's hub has them",
    ),
]
