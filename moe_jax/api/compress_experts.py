"""Compression of the experts of one layer: arrays in, a bank of experts out."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from moe_jax.compression import Method
from moe_jax.compression.methods.interface import Base
from moe_jax.compression.report import LayerFigures
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.spec import CompressSpec, MethodOption
from moe_jax.core.errors import InputError
from moe_jax.core.finite import check_finite
from moe_jax.distributed.sharding import path_name
from moe_jax.experts import BankConfig, ExpertBank, make_bank
from moe_jax.experts.shapes import shapes_of
from moe_jax.model_io.in_memory import LeavesInMemory, ModelInMemory
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Kernels = ExpertBank | Mapping[str, Float[np.ndarray, "E i o"]]


class CompressedExperts(NamedTuple):
    """The result of `compress_experts`.

        >>> import numpy as np
        >>> kernels = {"up": np.ones((2, 4, 8), np.float32), "down": np.ones((2, 8, 4), np.float32)}
        >>> moe_jax.compress_experts(kernels, method="quantize", bits=8).figures.relative_error < 0.01
        True

    Attributes:
      bank: the experts, to be applied to tokens and a routing decision, or to materialise one.
      moe: the config of an MoE layer with these experts.
      figures: the errors, and the figures that the method reports.
      groups: int32[E], which expert of the bank every output of the router means; None unless experts were merged.
    """

    bank: ExpertBank
    moe: MoEConfig
    figures: LayerFigures
    groups: Int[np.ndarray, " E"] | None


def compress_experts(
    experts: Kernels,
    *,
    method: str | Method,
    activation: Activation = "silu",
    base: Mapping[str, Float[np.ndarray, "i o"]] | None = None,
    router: Float[np.ndarray, "d E"] | None = None,
    **options: MethodOption,
) -> CompressedExperts:
    """Makes the experts of one layer smaller: arrays in, a bank of experts out.

        >>> import numpy as np
        >>> random = np.random.default_rng(0)
        >>> shapes = {"gate": (4, 8, 16), "up": (4, 8, 16), "down": (4, 16, 8)}
        >>> kernels = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        >>> small = moe_jax.compress_experts(kernels, method="resmoe", keep=0.25)
        >>> small.bank.num_bytes() < sum(kernel.nbytes for kernel in kernels.values())
        True
        >>> small.bank.kernels(0)["up"].shape
        (8, 16)

    Args:
      experts: the kernels of all experts, `up` [E, d, f], `down` [E, f, d] and perhaps `gate` [E, d, f]; or a bank. The
        kernels have any floating-point dtype, which the result keeps.
      method: as in `compress`.
      activation: activation of the experts, if kernels are given; a bank has its own.
      base: kernels of the dense FFN that the experts came from, for deltas from it: `up` [d, f], ...
      router: [d, E], for the methods that merge experts, which compare its columns.
      options: options of the method, such as `keep=0.25`.

    Raises:
      InputError: if shapes do not go together, an option does not go with the method, the method needs a calibration
        text, or weights are not finite.
    """
    name, made = CompressSpec(method=method, options=options).named_method()
    bank = experts
    if made.needs_calibration:
        raise InputError(f"{name} needs a text that a model runs over: use compress, of a whole model")
    moe, d_model, leaves = _bank_leaves(bank) if isinstance(bank, ExpertBank) else _kernel_leaves(bank, activation)
    if router is not None:
        leaves["router/kernel"] = _array("router", router, (d_model, moe.num_experts))
    layer = SourceLayer(_one_layer(moe, d_model, leaves), 0)
    shapes = moe.expert.shapes(d_model)
    dense = None
    if base is not None:
        if made.origin is not None:
            raise InputError(f"base does not go with {name}: it takes the {made.origin}")
        found = {f"{name}/kernel": _array(name, base[name], shapes[name]) for name in shapes if name in base}
        if len(found) < len(shapes) or len(base) > len(shapes):
            raise InputError(f"base has the kernels {', '.join(base)}; expected {', '.join(shapes)}")
        dense = _one_layer(moe.expert, d_model, found)
    made.check([layer])
    analysis = made.analyse(layer)
    target = made.plan([layer], {0: analysis})[0]
    written: dict[str, np.ndarray] = {}

    def write(path: str, leaf: np.ndarray) -> None:
        check_finite(path, leaf, "the kernels are too large for this method and their dtype")
        written[path] = leaf

    figures = made.compress(layer, Base(layer, dense), target, write, analysis)
    compressed = _make_bank(target, d_model, {**leaves, **written})
    return CompressedExperts(compressed, target, figures, written.get("groups"))


def _bank_leaves(bank: ExpertBank) -> tuple[MoEConfig, int, dict[str, np.ndarray]]:
    """Returns the config of the MoE layer of a bank, the width of the model, and the leaves of the layer."""
    state = jax.tree_util.tree_leaves_with_path(nnx.state(bank))
    moe = MoEConfig(expert=bank.expert, num_experts=bank.num_experts, top_k=bank.num_experts, bank=bank.config)
    d_model = bank.kernels(0)["up"].shape[0]
    return moe, d_model, {f"experts/{path_name(path)}": np.asarray(leaf) for path, leaf in state}


def _kernel_leaves(kernels: Mapping[str, Any], activation: Activation) -> tuple[MoEConfig, int, dict[str, np.ndarray]]:
    """Returns config, width and leaves as `_bank_leaves` does, for an MoE layer with these kernels."""
    unknown = [name for name in kernels if name not in ("gate", "up", "down")]
    if unknown or not {"up", "down"} <= kernels.keys():
        raise InputError(f"experts of the kernels {', '.join(kernels)}; expected up, down and perhaps gate")
    up = np.asarray(kernels["up"])
    if up.ndim != 3:
        raise InputError(f"up of shape {up.shape}; expected [experts, d_model, dim]")
    num_experts, d_model, dim = up.shape
    expert = FFNConfig(dim=dim, gated="gate" in kernels, activation=activation)
    moe = MoEConfig(expert=expert, num_experts=num_experts, top_k=num_experts, bank=BankConfig())
    leaves = {
        f"experts/{name}/kernel": _array(name, kernels[name], (num_experts, *shape))
        for name, shape in expert.shapes(d_model).items()
    }
    return moe, d_model, leaves


def _array(name: str, given: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(given)
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(f"{name} of shape {array.shape} and dtype {array.dtype}; expected floating point, {shape}")
    return array


def _one_layer(mlp: MoEConfig | FFNConfig, d_model: int, leaves: Mapping[str, np.ndarray]) -> ModelInMemory:
    """Returns a model of one layer that has no leaves but those of `mlp`."""
    attention = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=2)
    layers = (LayerConfig(attention=attention, mlp=mlp),)
    config = ModelConfig(family="llama", vocab_size=1, d_model=d_model, max_positions=1, layers=layers)
    # Deltas without a base are stored in the dtype of the layer's norm.
    norm = np.ones(d_model, np.float32)
    named = {f"layers/0/mlp/{path}": leaf for path, leaf in leaves.items()}
    return ModelInMemory(config, LeavesInMemory(named | {"layers/0/attention_norm/scale": norm}))


def _make_bank(moe: MoEConfig, d_model: int, leaves: Mapping[str, np.ndarray]) -> ExpertBank:
    """Returns the bank of an MoE layer, from its leaves."""

    def make(rngs: nnx.Rngs) -> ExpertBank:
        return make_bank(moe.bank, moe.expert, moe.bank_experts, d_model, rngs=rngs, dtype=jnp.dtype(jnp.float32))

    graphdef, state = nnx.split(shapes_of(make))
    filled = jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(leaves[f"experts/{path_name(path)}"]), state)
    return nnx.merge(graphdef, filled)
