"""Processes: started, forked, met, signalled, and ended; and the phase that each is in."""
