"""What experts are given on a text."""
