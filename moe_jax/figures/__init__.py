"""Plots of a model's experts: how similar they are, how often each is chosen, and for which tokens."""

from moe_jax.figures.expert_use import ExpertUse as ExpertUse
from moe_jax.figures.plots import write_figures as write_figures
from moe_jax.figures.similarity import LayerSimilarity as LayerSimilarity
from moe_jax.figures.similarity import comparable_layers as comparable_layers
from moe_jax.figures.similarity import measure_layers as measure_layers
from moe_jax.figures.similarity import measure_similarity as measure_similarity
from moe_jax.figures.use_plots import plots_of_use as plots_of_use
from moe_jax.figures.use_plots import use_numbers as use_numbers
