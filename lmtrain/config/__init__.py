"""Settings as typed, frozen data, composed by Hydra and checked before torch is imported."""
