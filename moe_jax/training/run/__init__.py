"""A training run on disk: its directory, checkpoints, continuation and restart."""
