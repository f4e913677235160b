"""Input files of every kind, opened, unpacked and cut into documents."""
