"""What pyproject.toml cannot say: the recipes and launchers in `train/` are in the package `moe_jax`, too."""

from setuptools import find_packages, setup

FOLDERS = {"moe_jax.recipes": "train/recipes", "moe_jax.launch": "train/launch"}

setup(packages=[*find_packages(include=["moe_jax", "moe_jax.*"]), *FOLDERS], package_dir=FOLDERS)
