"""GGUF files: header, blocks of quantised numbers, vocabulary."""
