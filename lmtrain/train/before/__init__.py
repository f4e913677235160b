"""What a run checks before its first step: machine, data, checkpoint, first weights."""
