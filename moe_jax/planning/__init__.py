"""What a model and its training will cost: parameters, bytes, the compiled step. From configs alone."""
