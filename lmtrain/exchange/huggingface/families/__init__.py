"""The families of Hugging Face's models that lmtrain exchanges, one module each. ../family.py finds them."""
