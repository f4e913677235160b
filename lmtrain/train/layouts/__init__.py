"""Layouts of a run before it starts: chosen, adapted to the number of processes, shown and priced."""
