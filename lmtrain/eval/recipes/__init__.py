"""How the files of published tasks become texts and choices."""
