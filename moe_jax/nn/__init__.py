"""Flax NNX modules: a whole model (`Decoder`), and the layers that it is made of.

They own parameters and call the pure functions of `moe_jax.functional` and the banks of `moe_jax.experts`. Each is
made from a config, a width and `nnx.Rngs`, and may stand in a model of your own.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> ffn = moe_jax.nn.FFN(moe_jax.FFNConfig(dim=32), 16, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))
    >>> ffn(jnp.ones((3, 16))).shape
    (3, 16)

Models:
    Decoder                          from tokens to logits; with an `encode` where there is an encoder
    DecoderOutput, Encoded           results of a call, and of `encode`
    Stack, StackOutput               the layers and the final norm, and the result of a call
    BlockStack, Block                layers that repeat, and one layer
    Layers                           the layers of a stack by their index
    LayerView, ExpertView, VariableView
                                     a layer, an expert and a parameter of one, read and written in the stack
    unstacked, is_stacked            a model whose layers have arrays of their own, and whether it has others

Layers:
    Embed, Head, Norm                token embeddings, logits, norms
    Vision, VisionTower              features of pictures as the model takes them, and an image encoder alone
    Attention, LatentAttention       grouped-query attention, and multi-head latent attention
    DeltaRule, ShortConv, Mamba2     the gated delta rule, a short convolution, Mamba-2, in the place of attention
    FFN, Linear                      a dense feed-forward network, and a linear map
    CodedTable                       an embedding or a head in codes
    MoE, Perft                       a Mixture-of-Experts, and adapters beside it
    LinearRouter, CoderRouter        logits of experts
    register_router, register_layer, register_projector_step
                                     routers, layers and steps of a projector of your own, for configs to name

Routing, as it is reported:
    TokenRouting                     the decision for every token
    StackedStats, RouterStatistics   statistics of all routers in a call, and of one over a text
    auxiliary_loss                   what training adds to its loss; `has_auxiliary_loss` says whether it is 0
    load_per_layer                   share of the assignments of every expert
    filters                          parameters by what they are for: of routers, experts, adapters

Arguments:
    Ids, Batch                       token ids, and arrays of a training batch
    CallInputs, DecoderInputs, StackInputs
                                     keywords of `Decoder`, of its `activations` and of `Stack`
    init_cache, Caches, Cache        caches for generation: made, of all layers, of one
    KVCache, LatentCache, RecurrentCache
                                     of grouped-query and of latent attention, and of a recurrence
    Context, Slots, Source           what all layers of a call share; in it places in caches, an encoder's output
    make_context                     makes one, for a layer that is called alone
    place_pictures, PlacedRow, tokens_per_picture
                                     room for pictures in rows of tokens, a row then, and how many tokens each takes
    ChangeLogits                     a function that replaces the logits of a router
    Inside, AtRouter, Kept           what `BlockStack` is asked of its layers, a layer of its router, and its answer
"""

from moe_jax.core.signatures import show_signatures as _show_signatures
from moe_jax.images.slots import PlacedRow as PlacedRow
from moe_jax.images.slots import place_pictures as place_pictures
from moe_jax.models.own_parts import register_layer as register_layer
from moe_jax.models.own_parts import register_router as register_router
from moe_jax.nn.attention import Attention as Attention
from moe_jax.nn.attention import LatentAttention as LatentAttention
from moe_jax.nn.block import Block as Block
from moe_jax.nn.block_stack import BlockStack as BlockStack
from moe_jax.nn.context import Cache as Cache
from moe_jax.nn.context import Caches as Caches
from moe_jax.nn.context import Context as Context
from moe_jax.nn.context import KVCache as KVCache
from moe_jax.nn.context import LatentCache as LatentCache
from moe_jax.nn.context import RecurrentCache as RecurrentCache
from moe_jax.nn.context import Slots as Slots
from moe_jax.nn.context import Source as Source
from moe_jax.nn.context import StackInputs as StackInputs
from moe_jax.nn.context import init_cache as init_cache
from moe_jax.nn.context import make_context as make_context
from moe_jax.nn.decoder import CallInputs as CallInputs
from moe_jax.nn.decoder import Decoder as Decoder
from moe_jax.nn.decoder import DecoderInputs as DecoderInputs
from moe_jax.nn.decoder import DecoderOutput as DecoderOutput
from moe_jax.nn.decoder import Encoded as Encoded
from moe_jax.nn.decoder import is_stacked as is_stacked
from moe_jax.nn.decoder import unstacked as unstacked
from moe_jax.nn.inputs import Batch as Batch
from moe_jax.nn.inputs import Ids as Ids
from moe_jax.nn.inside import AtRouter as AtRouter
from moe_jax.nn.inside import ChangeLogits as ChangeLogits
from moe_jax.nn.inside import Inside as Inside
from moe_jax.nn.inside import Kept as Kept
from moe_jax.nn.inside import TokenRouting as TokenRouting
from moe_jax.nn.layer_views import ExpertView as ExpertView
from moe_jax.nn.layer_views import Layers as Layers
from moe_jax.nn.layer_views import LayerView as LayerView
from moe_jax.nn.layer_views import VariableView as VariableView
from moe_jax.nn.layers import FFN as FFN
from moe_jax.nn.layers import CodedTable as CodedTable
from moe_jax.nn.layers import Embed as Embed
from moe_jax.nn.layers import Head as Head
from moe_jax.nn.layers import Linear as Linear
from moe_jax.nn.layers import Norm as Norm
from moe_jax.nn.moe import CoderRouter as CoderRouter
from moe_jax.nn.moe import LinearRouter as LinearRouter
from moe_jax.nn.moe import MoE as MoE
from moe_jax.nn.moe import Perft as Perft
from moe_jax.nn.moe import RouterStatistics as RouterStatistics
from moe_jax.nn.moe import StackedStats as StackedStats
from moe_jax.nn.moe import auxiliary_loss as auxiliary_loss
from moe_jax.nn.moe import has_auxiliary_loss as has_auxiliary_loss
from moe_jax.nn.moe import load_per_layer as load_per_layer
from moe_jax.nn.projector import register_projector_step as register_projector_step
from moe_jax.nn.projector import tokens_per_picture as tokens_per_picture
from moe_jax.nn.recurrent import DeltaRule as DeltaRule
from moe_jax.nn.recurrent import Mamba2 as Mamba2
from moe_jax.nn.recurrent import ShortConv as ShortConv
from moe_jax.nn.stack import Stack as Stack
from moe_jax.nn.stack import StackOutput as StackOutput
from moe_jax.nn.vision import Vision as Vision
from moe_jax.nn.vision import VisionTower as VisionTower

_show_signatures(
    *(Attention, LatentAttention, DeltaRule, ShortConv, Mamba2, Decoder, Stack, BlockStack, Block, Embed, Head, Norm),
    *(FFN, Linear, MoE, LinearRouter, CoderRouter, Perft, Vision, VisionTower),
)
