"""Blocks of quantised numbers in GGUF files, made with a small weighted error."""
