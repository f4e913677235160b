"""The training app: settings, set-up, loop and step."""
