"""The cost of a model and its training: parameters, bytes, the compiled step. From configs alone."""
