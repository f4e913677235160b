"""Records of a run: metrics, outputs, traces, profiles."""
