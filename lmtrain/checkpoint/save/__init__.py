"""How a run writes its checkpoints: snapshot, writing threads, agreement of ranks, commit."""
