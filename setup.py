"""What pyproject.toml cannot say: the recipes and launchers in `train/` are in the package `moe_jax`, too.

Folders of data alone are named as packages, because setuptools will leave out those that are not.
"""

from setuptools import find_packages, setup

FOLDERS = {
    "moe_jax.recipes": "train/recipes",
    "moe_jax.recipes.configs": "train/recipes/configs",
    "moe_jax.launch": "train/launch",
}
OF_DATA = ["moe_jax.harness.tasks"]

setup(packages=[*find_packages(include=["moe_jax", "moe_jax.*"]), *OF_DATA, *FOLDERS], package_dir=FOLDERS)
