"""Recipes: a training run described completely by one TOML file."""
