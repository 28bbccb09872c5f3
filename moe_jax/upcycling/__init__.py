"""A dense model made into an MoE (methods.md 2, 6): of copies, of a shared base with deltas, or of adapters (PESC).

`moe_jax.upcycle` is the verb. Here are its options as one object, the config that they give, and the check that the new
model computes what the old one did.

    >>> from moe_jax.upcycling import UpcycleOptions, upcycled_config
    >>> dense = moe_jax.tiny_model().config
    >>> upcycled_config(dense, UpcycleOptions(num_experts=4, every=1)).moe_layers
    (0, 1)
"""

from moe_jax.checks.step0 import Step0 as Step0
from moe_jax.upcycling.choose import chosen_options as chosen_options
from moe_jax.upcycling.choose import describe_options as describe_options
from moe_jax.upcycling.dense_to_moe import Upcycled as Upcycled
from moe_jax.upcycling.dense_to_moe import upcycle as upcycle
from moe_jax.upcycling.leaves import moe_leaves as moe_leaves
from moe_jax.upcycling.options import PESC as PESC
from moe_jax.upcycling.options import UpcycleOptions as UpcycleOptions
from moe_jax.upcycling.options import keeps_the_function as keeps_the_function
from moe_jax.upcycling.options import parse_delta as parse_delta
from moe_jax.upcycling.options import upcycled_config as upcycled_config
from moe_jax.upcycling.rest import Rest as Rest
from moe_jax.upcycling.rest import parse_rest as parse_rest
from moe_jax.upcycling.start import Start as Start
