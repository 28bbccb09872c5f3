"""Layers behind the last one, which predict tokens after the next."""
