"""The saving of a run's checkpoints: snapshot, writing threads, agreement of ranks, commit."""
