"""What a run will need and how long its steps will take, before there are GPUs. Torch-free."""
