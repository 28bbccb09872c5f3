"""Tokens out of a model: rows, caches and sampling, for `generate` and for `serve`."""
