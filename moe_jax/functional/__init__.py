"""Pure functions of arrays: routing, dispatch to experts, grouped products, attention, losses, codes.

None of them holds parameters, reads files or keeps state: they go under `jax.jit`, `jax.grad` and `jax.shard_map`, and
into modules of your own. Kernels are chosen by the platform that a program is compiled for.

    >>> import jax.numpy as jnp
    >>> from moe_jax import functional
    >>> routing, _ = functional.route(jnp.array([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), 1, "topk_softmax")
    >>> functional.sort_by_expert(routing.experts, 3).group_sizes.tolist()
    [1, 1, 0]

Names are imported when they are first asked for.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from moe_jax.functional.adapters import routed_adapters as routed_adapters
    from moe_jax.functional.attention.cached_attention import cached_attention as cached_attention
    from moe_jax.functional.attention.chunked_attention import chunked_attention as chunked_attention
    from moe_jax.functional.attention.grouped_query import attention as grouped_query_attention  # noqa: F401
    from moe_jax.functional.attention.rope import apply_rope as apply_rope
    from moe_jax.functional.attention.rope import rope_tables as rope_tables
    from moe_jax.functional.heads.cross_entropy import token_cross_entropies as token_cross_entropies
    from moe_jax.functional.heads.cross_entropy import weighted_cross_entropy as weighted_cross_entropy
    from moe_jax.functional.heads.distilled_cross_entropy import distilled_cross_entropy as distilled_cross_entropy
    from moe_jax.functional.heads.sampling import sample as sample
    from moe_jax.functional.norms import layer_norm as layer_norm
    from moe_jax.functional.norms import rms_norm as rms_norm
    from moe_jax.functional.products.grouped import grouped_matmul as grouped_matmul
    from moe_jax.functional.products.nf4 import dequantize_nf4 as dequantize_nf4
    from moe_jax.functional.products.nf4 import quantize_nf4 as quantize_nf4
    from moe_jax.functional.products.synthesis import synthesised_matmul as synthesised_matmul
    from moe_jax.functional.routing.decision import RouterStats as RouterStats
    from moe_jax.functional.routing.decision import Routing as Routing
    from moe_jax.functional.routing.decision import route as route
    from moe_jax.functional.routing.dispatch import combine as combine
    from moe_jax.functional.routing.dispatch import dispatch as dispatch
    from moe_jax.functional.routing.dispatch import sort_by_expert as sort_by_expert
    from moe_jax.functional.routing.gates import Gate as Gate
    from moe_jax.functional.routing.gates import Selection as Selection
    from moe_jax.functional.routing.gates import register_gate as register_gate
