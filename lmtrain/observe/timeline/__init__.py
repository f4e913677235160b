"""Every rank's spans on one clock: what a step's time went into, on which rank, and what it waited for. Torch-free."""
