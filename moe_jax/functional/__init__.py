"""Pure functions of arrays: routing, experts' products, attention, losses, codes.

None of them holds parameters, reads files or keeps state: they go under `jax.jit`, `jax.grad` and `jax.shard_map`,
and into modules of your own. Kernels are chosen by the platform that a program is compiled for.

    >>> import jax.numpy as jnp
    >>> from moe_jax import functional
    >>> routing, _ = functional.route(jnp.array([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), 1, "topk_softmax")
    >>> functional.sort_by_expert(routing.experts, 3).group_sizes.tolist()
    [1, 1, 0]

Names are imported when they are first asked for.

Routing:
    route                            chooses experts: a `Routing` and its `RouterStats`
    register_gate, Gate              a gate of your own
    Selection                        restricts the choice
    sort_by_expert, Order            assignments sorted by expert
    dispatch, combine                tokens to sorted rows, and back

Products:
    register_activation              an activation of your own
    grouped_matmul                   consecutive groups of rows, each with its own kernel
    synthesised_matmul, Tiles        the same with kernels that exist while they are multiplied
    routed_adapters                  adapters that tokens chose
    Product                          a product that is added to another
    quantize_nf4, dequantize_nf4     kernels in codes of 4 bits

Attention:
    grouped_query_attention, Placement
                                     by the kernel of the platform, and where it is
    chunked_attention, cached_attention, AttentionOptions
                                     on any platform, and with caches
    indexed_attention, Index         to keys that an indexer chooses
    Visibility                       which tokens see which
    rope_tables, apply_rope          rotary position embeddings
    layer_norm, rms_norm             norms

Heads and losses:
    token_cross_entropies            of every token; no logits of all tokens exist at once
    weighted_cross_entropy           their weighted sum, with its gradient
    distilled_cross_entropy, Distillation, TeacherArrays, DistilledLoss
                                     mixed with the divergence from a teacher
    HeadOptions, LossAxes            properties of a head, and how a mesh splits it
    sample                           one token per row
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from moe_jax.functional.adapters import routed_adapters as routed_adapters
    from moe_jax.functional.attention import Placement as Placement
    from moe_jax.functional.attention import attention as grouped_query_attention  # noqa: F401
    from moe_jax.functional.attention_chunks import AttentionOptions as AttentionOptions
    from moe_jax.functional.attention_chunks import Index as Index
    from moe_jax.functional.attention_chunks import Visibility as Visibility
    from moe_jax.functional.attention_chunks import cached_attention as cached_attention
    from moe_jax.functional.attention_chunks import chunked_attention as chunked_attention
    from moe_jax.functional.attention_chunks import indexed_attention as indexed_attention
    from moe_jax.functional.codes import dequantize_nf4 as dequantize_nf4
    from moe_jax.functional.codes import quantize_nf4 as quantize_nf4
    from moe_jax.functional.cross_entropy import Distillation as Distillation
    from moe_jax.functional.cross_entropy import DistilledLoss as DistilledLoss
    from moe_jax.functional.cross_entropy import TeacherArrays as TeacherArrays
    from moe_jax.functional.cross_entropy import distilled_cross_entropy as distilled_cross_entropy
    from moe_jax.functional.cross_entropy import token_cross_entropies as token_cross_entropies
    from moe_jax.functional.cross_entropy import weighted_cross_entropy as weighted_cross_entropy
    from moe_jax.functional.dense import Product as Product
    from moe_jax.functional.dense import layer_norm as layer_norm
    from moe_jax.functional.dense import rms_norm as rms_norm
    from moe_jax.functional.grouped import grouped_matmul as grouped_matmul
    from moe_jax.functional.head_chunks import HeadOptions as HeadOptions
    from moe_jax.functional.head_chunks import LossAxes as LossAxes
    from moe_jax.functional.position_embeddings import apply_rope as apply_rope
    from moe_jax.functional.position_embeddings import rope_tables as rope_tables
    from moe_jax.functional.routing.gates import Gate as Gate
    from moe_jax.functional.routing.gates import Selection as Selection
    from moe_jax.functional.routing.gates import register_gate as register_gate
    from moe_jax.functional.routing.route import route as route
    from moe_jax.functional.routing.router_stats import RouterStats as RouterStats
    from moe_jax.functional.routing.token_choices import Routing as Routing
    from moe_jax.functional.sampling import sample as sample
    from moe_jax.functional.synthesis import Tiles as Tiles
    from moe_jax.functional.synthesis import synthesised_matmul as synthesised_matmul
    from moe_jax.functional.token_dispatch import Order as Order
    from moe_jax.functional.token_dispatch import combine as combine
    from moe_jax.functional.token_dispatch import dispatch as dispatch
    from moe_jax.functional.token_dispatch import sort_by_expert as sort_by_expert
    from moe_jax.kernels.plain import register_activation as register_activation
