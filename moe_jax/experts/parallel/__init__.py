"""Experts over a mesh: rows travel to their experts, or parameters are gathered."""
