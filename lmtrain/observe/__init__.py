"""Metrics, event files, throughput, traces, the live view and the watchdog of a run."""
