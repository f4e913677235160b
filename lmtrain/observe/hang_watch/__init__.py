"""The watchdog: detects which process of a run hangs or is lost, and ends the run."""
