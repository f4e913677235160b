"""Terminal output of a run: plain lines and the live panel."""
