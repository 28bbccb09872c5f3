"""Flax NNX modules: thin shells that own parameters and call `functional/` and `experts/`."""

from moe_jax.nn.cache import Caches as Caches
from moe_jax.nn.cache import init_cache as init_cache
from moe_jax.nn.decoder import Decoder as Decoder
from moe_jax.nn.decoder import DecoderOutput as DecoderOutput
from moe_jax.nn.decoder import Encoded as Encoded
from moe_jax.nn.embed import Embed as Embed
from moe_jax.nn.head import Head as Head
from moe_jax.nn.router_stats import auxiliary_loss as auxiliary_loss
from moe_jax.nn.router_stats import load_per_layer as load_per_layer
from moe_jax.nn.stack import Stack as Stack
from moe_jax.nn.unstacked import is_stacked as is_stacked
from moe_jax.nn.unstacked import unstacked as unstacked
