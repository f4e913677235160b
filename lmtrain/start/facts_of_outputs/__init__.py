"""What is known of runs, checkpoints, datasets and traces that exist, as plain data; whoever asks prints it."""
