"""The families of Hugging Face's models that lmtrain exchanges, one module each. ../model_family_base.py finds them."""
