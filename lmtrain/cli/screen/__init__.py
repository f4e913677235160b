"""Printing on the terminal: lines, messages, tables, lists of facts."""
