"""Data about the experts from running the model on a text."""
