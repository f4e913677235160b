"""lmtrain: pretrain GPT and BERT language models, from raw text to an evaluated checkpoint.

The names in `__all__` are the Python interface, for notebooks and scripts; docs/how_to/use_from_python.md shows them.
Each is imported when it is first used, so that `import lmtrain` takes a millisecond.
"""

__version__ = "0.1.0"
__all__ = [
    "Dataset", "LmtrainError", "Metrics", "Model", "Tokenizer", "add_plugin", "evaluate", "load", "metrics",
    "open_dataset", "pretrain", "runs", "settings",
]  # fmt: skip

TYPE_CHECKING = False  # because: type checkers take this name for True, and importing `typing` is slow

if TYPE_CHECKING:
    from lmtrain.api.encode_and_decode_text import Tokenizer
    from lmtrain.api.evaluate import evaluate
    from lmtrain.api.list_runs import runs
    from lmtrain.api.load_model import Model, load
    from lmtrain.api.open_dataset import Dataset, open_dataset
    from lmtrain.api.pretrain import pretrain
    from lmtrain.api.read_run_metrics import Metrics, metrics
    from lmtrain.api.settings_and_plugins import add_plugin, settings
    from lmtrain.errors import LmtrainError
else:  # because: type checkers would take any name for one that `__getattr__` knows
    _MODULES = {
        "Dataset": "lmtrain.api.open_dataset", "LmtrainError": "lmtrain.errors",
        "Metrics": "lmtrain.api.read_run_metrics", "Model": "lmtrain.api.load_model",
        "Tokenizer": "lmtrain.api.encode_and_decode_text", "add_plugin": "lmtrain.api.settings_and_plugins",
        "evaluate": "lmtrain.api.evaluate", "load": "lmtrain.api.load_model", "metrics": "lmtrain.api.read_run_metrics",
        "open_dataset": "lmtrain.api.open_dataset", "pretrain": "lmtrain.api.pretrain", "runs": "lmtrain.api.list_runs",
        "settings": "lmtrain.api.settings_and_plugins",
    }  # fmt: skip

    def __getattr__(name):
        """Import and return a name of the Python interface, which is then kept as an attribute of the package."""
        if name not in _MODULES:
            raise AttributeError(f"module 'lmtrain' has no attribute {name!r}. It has {', '.join(__all__)}.", name=name)
        # because: every process of a run imports this file, and needs neither
        import gc
        from importlib import import_module

        was_enabled = gc.isenabled()
        gc.disable()  # because: scanning torch's objects again and again takes a sixth of the time of its import
        try:
            value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        finally:
            if was_enabled:
                gc.enable()
        return value

    def __dir__():
        """Return the names that an editor or notebook completes."""
        return sorted({*__all__, "__version__"})
