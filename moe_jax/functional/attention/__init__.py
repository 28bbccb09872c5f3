"""Attention, and the positions that it knows."""
