"""Layouts of a run before it starts: chosen, fitted to fewer processes, shown, forecast."""
