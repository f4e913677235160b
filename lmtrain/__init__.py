"""lmtrain: pretrain GPT and BERT language models, from raw text to an evaluated checkpoint."""

__version__ = "0.1.0"
