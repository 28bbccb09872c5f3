"""Pictures from bytes to pixels: decoded within bounds, and processed as a model's preprocessor config says."""
