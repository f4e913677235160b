"""The keys of all settings: completed as they are typed, and listed with types and defaults."""
