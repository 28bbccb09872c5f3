"""Upcycling of dense models to MoEs, and of MoEs to larger ones (methods.md 2, 6), in its parts.

`moe_jax.upcycle` is the verb. This package has its options as one object, the config that they result in, and the
check that the new model computes the same as the old one.

    >>> from moe_jax.upcycling import UpcycleSpec, upcycled_config
    >>> dense = moe_jax.tiny_model().config
    >>> upcycled_config(dense, UpcycleSpec(experts=4, every=1)).moe_layers
    (0, 1)

Names are imported when they are first asked for: options are read without JAX.

    UpcycleSpec, DenseParameters     the options, and those of what was there before
    parse_delta, parse_rest          options in words
    upcycled_config                  the config of the MoE
    upcycle, Upcycled                makes it, layer by layer; and the result
    Prompt, ProbeText                texts that routers are made from, and that models are compared on
    moe_leaves                       the leaves of one layer
    Step0, TextComparison, Stored    parts of the result: logits compared, predictions compared, sizes
    keeps_the_function               whether equal experts add up to the dense FFN
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from moe_jax.checks.step0 import ProbeText as ProbeText
    from moe_jax.checks.step0 import Step0 as Step0
    from moe_jax.checks.step0 import TextComparison as TextComparison
    from moe_jax.upcycling.beginnings import Prompt as Prompt
    from moe_jax.upcycling.dense_to_moe import keeps_the_function as keeps_the_function
    from moe_jax.upcycling.dense_to_moe import upcycle as upcycle
    from moe_jax.upcycling.dense_to_moe import upcycled_config as upcycled_config
    from moe_jax.upcycling.expert_leaves import moe_leaves as moe_leaves
    from moe_jax.upcycling.outcome import Stored as Stored
    from moe_jax.upcycling.outcome import Upcycled as Upcycled
    from moe_jax.upcycling.spec import DenseParameters as DenseParameters
    from moe_jax.upcycling.spec import UpcycleSpec as UpcycleSpec
    from moe_jax.upcycling.spec import parse_delta as parse_delta
    from moe_jax.upcycling.spec import parse_rest as parse_rest
