"""Processes: started, forked, met, signalled, and ended."""
