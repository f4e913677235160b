"""The words of a command line: parsed, completed as they are typed, and explained where they are wrong."""
