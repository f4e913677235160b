"""Events between two steps: requests, validation, evaluation, lost starts."""
