"""Writing a model in the format of another library: its leaves, in runs of tensors, and what says what it is."""
