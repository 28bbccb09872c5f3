"""Flax NNX modules: thin shells that own parameters and call `functional/` and `experts/`."""

from moe_jax.nn.decoder import Decoder as Decoder
from moe_jax.nn.decoder import DecoderOutput as DecoderOutput
from moe_jax.nn.decoder import init_cache as init_cache
from moe_jax.nn.router_stats import auxiliary_loss as auxiliary_loss
from moe_jax.nn.router_stats import load_per_layer as load_per_layer
