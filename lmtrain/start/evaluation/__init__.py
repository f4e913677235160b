"""An evaluation of trained models: what it scores, in which layout, and where its results go; it prints nothing."""
