"""Texts to calibrate on: how they are named and weighted, and those that come with the library."""
