"""Prints the output of commands that takes more than a few lines."""
