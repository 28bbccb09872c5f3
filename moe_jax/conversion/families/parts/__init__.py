"""Common parts of families."""
