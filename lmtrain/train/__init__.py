"""Training: settings, set-up, loop and step."""
