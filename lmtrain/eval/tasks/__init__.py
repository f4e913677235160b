"""The evaluation tasks, a file each; each file states its protocol."""
