"""HTML pages that need no other file, and SVG charts for them; independent of runs, plans and verbs."""
