"""Counts the arithmetic of a model, from its config alone."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import jax.numpy as jnp

from moe_jax.core.data_sheets import chip_of_kind
from moe_jax.data.sections import input_length
from moe_jax.experts.shapes import LoRAConfig
from moe_jax.models import (
    AttentionConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    RecurrentConfig,
    VisionConfig,
)
from moe_jax.nn.projector import projector_shapes
from moe_jax.training.recipe import Recipe


def active_matmul_params(config: ModelConfig) -> int:
    """Number of entries of the matrices that one token is multiplied with; the embedding, a look-up, counts nothing.

    Experts over a shared base count the base once and the deltas of the k chosen experts (methods.md 3).
    """
    return sum(_layer_params(layer, config) for layer in config.layers) + config.d_model * config.num_outputs


def train_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Returns the floating-point operations of one training step per token, usually called model FLOPs.

    Forward, and twice as much backward: `6 * active_matmul_params`, and for attention `6 * H` times the widths of a
    head's keys and values times the mean number of positions a query sees in a sequence of `seq_len` (about half of it
    if causal, and at most the window); for a recurrence three times its `token_flops`. Operations repeated for
    rematerialisation do not count, and frozen parameters count like trained ones. For cross-attention the projections
    count, as if the source were as long, but not the scores.
    """
    return 6 * active_matmul_params(config) + sum(_mixer_flops(layer, config, seq_len) for layer in config.layers)


def further_flops_per_token(config: ModelConfig, seq_len: int, depth: int) -> float:
    """Returns what the loss of `depth` layers that predict tokens after the next adds to `train_flops_per_token`.

    Each is a layer of the form of the last one, a matrix [2 d, d] that joins its inputs, and the head once more.
    """
    layer, d_model = config.layers[-1], config.d_model
    matrices = _layer_params(layer, config) + 2 * d_model**2 + d_model * config.num_outputs
    return depth * (6 * matrices + _mixer_flops(layer, config, seq_len))


def peak_flops(kind: str, platform: str, dtype: str, given: float | None) -> float | None:
    """Returns the operations per second that a device can do in products of a dtype; None if unknown.

    `kind` is JAX's `device_kind`; the number `given` in the recipe counts before any table.
    """
    # All CPUs have one kind, however fast they are.
    chip = None if platform == "cpu" else chip_of_kind(kind)
    if given is not None or chip is None:
        return given
    return chip.operations_per_second(jnp.dtype(dtype).itemsize)


TowerUse = Literal["frozen", "trained", "kept"]
"""A step may run the tower forward, train it, or not run it: what it makes of pictures is kept, and given as it is."""


class StepFlops(Protocol):
    """Operations of a step by its tokens, those of an encoder's inputs, and its pictures."""

    def __call__(self, tokens: float, inputs: float = 0, pictures: float = 0) -> float: ...


def step_flops(
    config: ModelConfig, seq_len: int, input_len: int, *, tower: TowerUse = "frozen", further: int = 0
) -> StepFlops:
    """Returns the floating-point operations of a training step as a function of what is in it.

    As `train_flops_per_token`, in sequences of `seq_len` tokens. With an encoder, inputs of `input_len` tokens pass
    through its layers, and through the projections of keys and values of cross-attention, whose scores count, too.
    Pictures pass through the `tower`, and their features, which count as tokens besides, through the projector. So many
    `further` layers that predict tokens after the next are run.
    """
    if not config.has_encoder:
        per_token = train_flops_per_token(config, seq_len) + further_flops_per_token(config, seq_len, further)
        per_picture = 0.0 if config.vision is None else picture_flops(config).of_step(tower)
        return lambda tokens, inputs=0, pictures=0: tokens * per_token + pictures * per_picture
    head = 6 * config.d_model * config.num_outputs
    crossing = [layer.cross for layer in config.decoder.layers if layer.cross is not None]
    sources = 6 * sum(_key_value_params(cross, config.d_model) for cross in crossing)
    scores = sum(12 * cross.num_heads * cross.head_dim * input_len for cross in crossing)
    per_input = train_flops_per_token(config.encoder, input_len) - head + sources
    per_token = train_flops_per_token(config.decoder, seq_len) - sources + scores
    return lambda tokens, inputs=0, pictures=0: tokens * per_token + inputs * per_input


def batch_flops(recipe: Recipe, config: ModelConfig, *, pictures: int = 0, tower: TowerUse = "frozen") -> float:
    """Returns the floating-point operations of a step of a recipe, by `step_flops`, with every row of a batch full.

    There are so many pictures in every row.
    """
    rows, seq_len, input_len = recipe.train.batch_size, recipe.data.seq_len, input_length(recipe.data)
    flops = step_flops(config, seq_len, input_len, tower=tower, further=recipe.further_depth(config.further_layers))
    return flops(rows * seq_len, rows * input_len, rows * pictures)


class PictureFlops(NamedTuple):
    """Floating-point operations that a picture takes beside those of its tokens: of the tower and of the projector."""

    tower: float
    projector: float

    def of_tower(self, use: TowerUse = "frozen") -> float:
        """Returns the operations of the tower in a training step: of one that is frozen, those of going forward."""
        return {"frozen": 1, "trained": 3, "kept": 0}[use] * self.tower

    def of_step(self, use: TowerUse = "frozen") -> float:
        """Returns the operations of tower and projector in a training step."""
        return self.of_tower(use) + 3 * self.projector


def picture_flops(config: ModelConfig) -> PictureFlops:
    """Returns the operations of a forward pass for one picture: those of products with matrices, and of attention.

    Layers of the tower behind the last whose output is taken are not run.

    Raises:
      InputError: for a model that takes no pictures.
    """
    vision = config.check_sees("pictures")
    tower, patches = vision.tower, vision.tower.patches
    assert patches is not None
    layers = tower.layers[: max(vision.hidden_states)]
    rows, columns = vision.grid
    tokens = rows * columns + patches.class_token
    matrices = sum(_entries(layer.attention, tower.d_model) for layer in layers)
    matrices += sum(_mlp_params(layer, tower) for layer in layers)
    scores = sum(
        2 * one.num_heads * (one.head_dim + one.value_dim) for one in (layer.softmax_attention for layer in layers)
    )
    entering = 2 * rows * columns * patches.channels * patches.size**2 * tower.d_model
    return PictureFlops(entering + 2 * tokens * matrices + scores * tokens**2, _projector_flops(vision, config.d_model))


def _projector_flops(vision: VisionConfig, d_model: int) -> float:
    """Returns the operations of a projector's matrices, each of which is multiplied with the features before it."""
    found = projector_shapes(vision, d_model)
    return sum(2.0 * count * math.prod(shape) for count, shapes in found for shape in shapes if len(shape) == 2)


def _layer_params(layer: LayerConfig, config: ModelConfig) -> int:
    mixers = (one for one in (layer.attention, layer.cross) if one is not None)
    return sum(_entries(one, config.d_model) for one in mixers) + _mlp_params(layer, config)


def _mixer_flops(layer: LayerConfig, config: ModelConfig, seq_len: int) -> float:
    """Returns the operations of a layer's scores and weighted values, or of its recurrence, per token in training."""
    if layer.is_recurrent:
        return 3 * layer.recurrence.token_flops
    one = layer.softmax_attention
    scores = 6 * one.num_heads * (one.head_dim + one.value_dim) * _mean_context(one, seq_len)
    return scores + _indexer_flops(one, config.d_model, seq_len)


def _key_value_params(attention: AttentionConfig, d_model: int) -> int:
    source = d_model if attention.source_dim is None else attention.source_dim
    return 2 * source * attention.num_kv_heads * attention.head_dim


def _entries(part: AttentionConfig | RecurrentConfig | FFNConfig, d_model: int) -> int:
    shapes = part.shapes(d_model)
    return sum(map(math.prod, shapes.values())) + _lora_params(part.lora, shapes)


def _mlp_params(layer: LayerConfig, config: ModelConfig) -> int:
    mlp, d_model = layer.mlp, config.d_model
    if isinstance(mlp, FFNConfig):
        return _entries(mlp, d_model)
    beside = _entries(mlp.universal_ffn, d_model) if mlp.universal_beside else 0
    bank = mlp.bank.multiplied_entries(mlp.expert, d_model, mlp.bank_top_k)
    return _router_params(mlp, d_model) + beside + bank + _perft_params(mlp, d_model)


def _router_params(mlp: MoEConfig, d_model: int) -> int:
    """Parameters of a linear router; or of a `coder` router's two matrices and the noise matrix for training."""
    linear = d_model * mlp.num_experts
    lora = _lora_params(mlp.router_lora, {"router": (d_model, mlp.num_experts)})
    own = d_model if mlp.universal == "sigmoid" else 0
    return lora + own + (2 * linear + mlp.num_experts**2 if mlp.universal == "coder" else linear)


def _perft_params(mlp: MoEConfig, d_model: int) -> int:
    perft = mlp.perft
    if perft is None:
        return 0
    router = d_model * perft.num_experts if perft.variant == "routed" else 0
    return router + mlp.perft_top_k * 2 * d_model * perft.adapter.rank


def _lora_params(lora: LoRAConfig | None, shapes: Mapping[str, tuple[int, int]]) -> int:
    return 0 if lora is None else sum(lora.rank * sum(shapes[name]) for name in lora.targets)


def _indexer_flops(attention: AttentionConfig, d_model: int, seq_len: int) -> float:
    """Returns the operations of a token in a layer's indexer, which has a forward pass only, if rows need it."""
    latent = attention.latent
    indexer = None if latent is None or not latent.has_own_indexer else latent.indexer
    if latent is None or indexer is None or seq_len <= indexer.top_k:
        return 0
    assert latent.q_rank is not None
    entries = latent.q_rank * indexer.num_heads * indexer.head_dim + d_model * (indexer.head_dim + indexer.num_heads)
    return 2 * entries + 2 * indexer.num_heads * indexer.head_dim * (seq_len + 1) / 2


def _mean_context(attention: AttentionConfig, seq_len: int) -> float:
    if attention.mask == "bidirectional" and attention.reach is None:
        return seq_len
    if attention.block_tokens is not None:
        blocks, rest = divmod(seq_len, attention.block_tokens)
        return (blocks * attention.block_tokens * (attention.block_tokens + 1) + rest * (rest + 1)) / (2 * seq_len)
    indexer = None if attention.latent is None else attention.latent.indexer
    window = min(seq_len, attention.sliding_window or seq_len, seq_len if indexer is None else indexer.top_k)
    before = window * (window + 1) // 2 + (seq_len - window) * window
    # With as many tokens after a query as before it, the query itself counts once.
    seen = 2 * before - seq_len if attention.mask == "bidirectional" else before
    return seen / seq_len
