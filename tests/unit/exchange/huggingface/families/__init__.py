"""The families of Hugging Face's models, beside transformers: random small models with large weights.

A family has a module NAME_configs.py here with CONFIGS, model_type -> function that draws the entries of a config.json.
"""
