"""Dense model to MoE model (methods.md 2, 6): vanilla copies, a shared base with deltas, or adapter experts (PESC)."""

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
