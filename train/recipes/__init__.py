"""Recipes: a training run described completely by one TOML file each. `moe-jax train NAME` finds them."""
