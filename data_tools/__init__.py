"""Tools from raw text to token files; this package never imports torch."""
