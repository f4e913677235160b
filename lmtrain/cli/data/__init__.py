"""`lmtrain corpus`, `tokenizer`, `preprocess` and `data`: from raw text to a dataset."""
