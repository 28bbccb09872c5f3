"""Tokens of texts: their bounds and lengths, long texts, and files of tokens."""
