"""Where a run's record goes besides its own folder: TensorBoard, Weights & Biases."""
