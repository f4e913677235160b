"""From raw text to token files; never imports torch."""
