"""Traces of every process in small files, written while a run trains and read afterwards or meanwhile."""
