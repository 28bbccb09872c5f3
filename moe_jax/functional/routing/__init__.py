"""Routing: which experts a token goes to, and with what weights. Always float32 (methods.md 1)."""
