"""Which rank holds what: layouts, stages, and the place of every number. Torch-free."""
