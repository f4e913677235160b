"""Facts that must be equal on all ranks: settings, data, tokenizer, checkpoint, code and libraries. Torch-free.

Called by compare_ranks_at_start.py, on every rank. Content is compared, never its place: nodes may have their own
copies of the data. The cost is milliseconds, because only this package is read in full.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST, MAX_MANIFEST_BYTES
from lmtrain.config.settings_base import facts_of, plugins, show
from lmtrain.data.assemble_training_data import open_datasets
from lmtrain.runfolder.lineage import file_sha256
from lmtrain.runfolder.settings_differences import flatten
from lmtrain.runtime.files.atomic_files import read_bytes
from lmtrain.runtime.processes.process_environment import version_of
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import Inputs, with_final_model

PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers")
FILE_DIGESTS = "files_sha256"  # the entry of a start row with the file digests of settings
_DIGEST_CHARACTERS = 12  # characters of a digest


@dataclass(frozen=True)
class Fact:
    """A value that must be equal on all ranks, and the text that shows it in a message."""

    value: str
    text: str


def rank_facts(config: RunConfig, inputs: Inputs) -> dict[str, Fact]:
    """Return, for this rank, everything that must be equal on all ranks, as name -> Fact: settings, digests of data,
    tokenizer and checkpoint, versions of code and libraries. An error message lists differences in this order.
    """
    # because: an empty data.valid_paths names no dataset, and is no setting to compare
    settings = {key: value for key, value in flatten(with_final_model(config, inputs).to_dict()) if value != {}}
    places = {key: facts_of(RunConfig, key).get("path") for key in settings}
    facts = {key: Fact(show(value), show(value)) for key, value in settings.items() if places[key] is None}
    facts |= {key: _digest_fact(digest, show(settings[key])) for key, digest in file_digests(config).items()}
    paths = [key for key, value in settings.items() if places[key] == "dataset" and value is not None]
    paths.sort(key=lambda key: key.startswith("data.valid"))  # because: training datasets are opened first
    if not config.stages:
        for key, dataset in zip(paths, open_datasets(config.data).datasets, strict=True):
            facts[key] = _digest_fact(dataset.content_digest, dataset.prefix)
    texts: dict[str, Fact] = {}
    for stage, stage_inputs in inputs.stages(config):
        name, data = f"stages.{stage.stage_name}: " if stage.stage_name else "", stage_inputs.data
        for number, dataset in enumerate(data.datasets if config.stages else ()):
            facts[f"{name}dataset {number}"] = _digest_fact(dataset.content_digest, dataset.prefix)
        facts |= {f"{name}data: {key}": Fact(show(value), show(value)) for key, value in data.sample_identity.items()}
        texts |= {
            f"{name}the text of eval.tasks, {task.name}": _digest_fact(
                f"{task.text_sha256} {task.num_targets}", task.data
            )
            for task in stage_inputs.evaluations
        }
    facts["data.tokenizer"] = _digest_fact(inputs.tokenizer.fingerprint, config.data.tokenizer or "beside the data")
    facts["checkpoint"] = checkpoint_fact(inputs.resume_from)
    facts["checkpoint.init_from"] = checkpoint_fact(inputs.weights_from)
    return facts | texts | program_facts()


def file_digests(config: RunConfig) -> dict[str, str]:
    """Return dotted key -> SHA-256 of the file, or "no file" if it is not there, for each setting with the fact
    path="file" that is set; several digests for a list of files. Other paths lead to datasets, checkpoints and the
    like, which have digests of their own.
    """
    files = {
        key: [value] if isinstance(value, str) else value for key, value in flatten(config.to_dict())
        if value and facts_of(RunConfig, key).get("path") == "file"
    }  # fmt: skip
    return {
        key: " ".join(file_sha256(Path(path)) if Path(path).is_file() else "no file" for path in paths)
        for key, paths in files.items()
    }


def program_facts() -> dict[str, Fact]:
    """Return the versions of Python and of the libraries, and a digest of each source file of lmtrain and of each
    plugin, as name -> Fact.
    """
    versions = {"python": platform.python_version()}
    versions |= {name: version_of(name) or "not installed" for name in _LIBRARIES}
    facts = {name: Fact(version, version) for name, version in versions.items()}
    facts |= {f"lmtrain/{name}": _digest_fact(digest) for name, digest in code_digests(PACKAGE)}
    for name, (package, *_) in plugins.items():
        plugin_digest = hashlib.sha256()
        for folder in map(Path, getattr(package, "__path__", None) or [str(package.__file__)]):
            for file, digest in code_digests(folder):
                plugin_digest.update(f"{file} {digest}\n".encode())
        facts[f"--plugin={name}"] = _digest_fact(plugin_digest.hexdigest())
    return facts


def _digest_fact(value: str, place: object = None) -> Fact:
    """Return a Fact with a digest as its value. Its text is the start of the digest, followed by `place`, the path of
    the content, if given.
    """
    short = value[:_DIGEST_CHARACTERS]
    return Fact(value, short if place is None else f"{short} ({place})")


def checkpoint_fact(path: Path | None) -> Fact:
    """Return a Fact with the digest of the manifest of the checkpoint at `path`, or with the value "none" if `path` is
    None.
    """
    if path is None:
        return Fact("none", "none")
    manifest = read_bytes(path / MANIFEST, MAX_MANIFEST_BYTES, follow_links=False)
    return _digest_fact(hashlib.sha256(manifest).hexdigest(), path)


@cache
def code_digests(place: Path) -> tuple[tuple[str, str], ...]:
    """Return (file name, SHA-256 digest) for each .py file of the package folder `place`, or for the single file
    `place`. The result is cached, so that later edits do not change it.

    The compiled helper is left out, because its results equal those of the Python code.
    """
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    names = [file.relative_to(place).as_posix() if place.is_dir() else file.name for file in files]
    return tuple((name, hashlib.sha256(file.read_bytes()).hexdigest()) for name, file in zip(names, files, strict=True))
