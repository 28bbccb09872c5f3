"""Plots of a model's experts: how similar they are, and how often each is chosen."""

from moe_jax.figures.plots import write_figures as write_figures
from moe_jax.figures.similarity import LayerSimilarity as LayerSimilarity
from moe_jax.figures.similarity import comparable_layers as comparable_layers
from moe_jax.figures.similarity import measure_layers as measure_layers
from moe_jax.figures.similarity import measure_similarity as measure_similarity
