"""Commands that run as several processes: start them, and report errors to those that wait."""
