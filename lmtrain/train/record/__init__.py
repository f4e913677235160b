"""What a run records: metrics, outputs, traces, profiles."""
