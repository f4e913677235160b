"""Settings as data: typed, frozen, composed by Hydra, judged before torch is imported."""
