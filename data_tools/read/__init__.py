"""Input files of every kind: opening, decompression and splitting into documents."""
