"""Compression of a model, and of the experts of one layer."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from moe_jax.api.calibrate import calibrate as record_calibration
from moe_jax.api.model import Model, ModelOrPath, OutPath, destination, open_model, result
from moe_jax.compression import Method, make_method
from moe_jax.compression import compress as _compress
from moe_jax.compression.choose_layers import parse_layers
from moe_jax.compression.job.stream import check_before_calibration, choose_layers
from moe_jax.compression.layer_figures import LayerFigures
from moe_jax.compression.methods.delta_base import Base
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.core.finite import check_finite
from moe_jax.core.formatting import parse_bytes
from moe_jax.distributed.sharding import path_name
from moe_jax.experts import BankConfig, ExpertBank, make_bank
from moe_jax.experts.forms.fresh import shapes_of
from moe_jax.model_io.cast_source import CastSource
from moe_jax.model_io.in_memory import LeavesInMemory, ModelInMemory
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Kernels = ExpertBank | Mapping[str, Float[np.ndarray, "E i o"]]


def compress(
    model: ModelOrPath,
    out: OutPath = None,
    *,
    method: str,
    base: ModelOrPath | None = None,
    extended: bool = False,
    layers: str | Sequence[int] | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    samples: int | None = None,
    calibration_seed: int = 0,
    gradients: bool = False,
    calibration_dir: str | os.PathLike[str] | None = None,
    seq_len: int | None = None,
    batch_size: int = 8,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    **options: Any,
) -> Model:
    """Makes the experts of a trained Mixture-of-Experts smaller.

        >>> moe = moe_jax.tiny_model(experts=4)
        >>> small = moe_jax.compress(moe, method="up", keep=0.25, layers="top:1")
        >>> measured = small.lineage[-1]["measured"]
        >>> measured["bytes_after"] < measured["bytes_before"]
        True

    Args:
      model: a model with MoE layers, or the path of one.
      out: where a model directory appears, which must not exist; None: the model stays in memory. A job that was killed
        goes on where it was when it is started again with the same options.
      method: `resmoe`, `ders-sparsify`, `ders-quantize`, or a baseline: `up`, `sp`, `svd`, `msmoe`, `meo`,
        `git-rebasin`, `mlp-fusion`, `quantize`, `mobe`; with `calibrate` also `reap`, `hc-smoe`,
        `d2-moe`, `allocate`.
      base: the dense model that the experts came from, for deltas from it, or the path of one; by default the base that
        a layer has already, or else the mean of its experts.
      extended: the universal FFN beside the experts becomes one more delta of the same base.
      layers: the layers to compress, as indices from 0 or as in `"top:24"`; None: all MoE layers. Of a model with an
        encoder its layers come first, or are named as in `"encoder:0,2,decoder:top:2"`.
      calibrate: a text file that the model is run on first. Methods that merge experts then know how these are used;
        all others, but for `sp` and `mlp-fusion`, what the experts are given, and keep what changes their outputs
        least. Without it, all experts and all inputs count alike.
      samples, calibration_seed: how many windows are drawn of that text, by default 128, or as many as it has; and with
        which seed.
      gradients: whether tokens of that text count by the squared gradient of its loss with respect to what a layer
        gives for them.
      calibration_dir: a folder in which what was found is kept, for the same text to be used again; None: nowhere.
      seq_len, batch_size: tokens that the model sees at a time on it, and windows computed at once.
      dtype: of what is not in codes; None: as stored.
      options: of the method, such as `keep=0.25` or `bits=4`; `moe-jax compress --help` lists them.

    Returns:
      The smaller model. Errors and bytes of every layer are in the last entry of its lineage.

    Raises:
      FileNotFoundError: if there is nothing at a path.
      InputError: if the model has no experts, an option does not go with it or the method, weights are not finite, or
        `out` exists. Nothing is left behind.
      OSError: if the disk is full. What is done stays beside `out`, to be gone on with.
    """
    made, source = _method(method, options), open_model(model)
    if dtype is not None:
        source = CastSource(source, dtype)
    indices = parse_layers(layers, source.config) if isinstance(layers, str) else layers
    calibration = None
    described: dict[str, Any] = {"base": None, "extended": extended, "layers": indices}
    if base is not None:
        described["base"] = str(open_model(base).path)
    if dtype is not None:
        described["dtype"] = dtype
    if calibrate is not None:
        check_before_calibration(source, made, choose_layers(source.config, indices), extended=extended)
        calibration = record_calibration(
            open_model(model),
            calibrate,
            samples=samples,
            seq_len=seq_len,
            batch_size=batch_size,
            seed=calibration_seed,
            place=None if calibration_dir is None else Path(calibration_dir).joinpath,
            mesh=model.mesh if isinstance(model, Model) else None,
            sensitivities=made.needs_sensitivities,
            gradients=gradients,
        )
        described |= {"calibrate": str(calibrate), "seq_len": seq_len, "samples": samples}
        described |= {"calibration_seed": calibration_seed} | ({"gradients": True} if gradients else {})
    elif gradients:
        raise InputError("gradients go with calibrate: name a text")
    target = destination(out)
    _compress(
        source,
        target,
        made,
        base=None if base is None else open_model(base),
        extended=extended,
        layers=indices,
        calibration=calibration,
        described=described | {"method": method, **dataclasses.asdict(made)},
    )
    return result(target, model)


class CompressedExperts(NamedTuple):
    """What `compress_experts` made.

        >>> import numpy as np
        >>> kernels = {"up": np.ones((2, 4, 8), np.float32), "down": np.ones((2, 8, 4), np.float32)}
        >>> moe_jax.compress_experts(kernels, method="quantize", bits=8).figures.relative_error < 0.01
        True

    Attributes:
      bank: the experts, to be applied to tokens and a routing decision, or to materialise one.
      moe: what the MoE layer becomes that has them.
      figures: errors, and how they came to be.
      groups: int32[E], which expert of the bank every output of the router means; None unless experts were merged.
    """

    bank: ExpertBank
    moe: MoEConfig
    figures: LayerFigures
    groups: Int[np.ndarray, " E"] | None


def compress_experts(
    experts: Kernels,
    *,
    method: str,
    activation: Activation = "silu",
    base: Mapping[str, Float[np.ndarray, "i o"]] | None = None,
    router: Float[np.ndarray, "d E"] | None = None,
    **options: Any,
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
      method: as of `compress`.
      activation: of the experts, if kernels are given; a bank has its own.
      base: kernels of the dense FFN that the experts came from, for deltas from it: `up` [d, f], ...
      router: [d, E], for the methods that merge experts, which look at how alike its columns are.
      options: of the method, such as `keep=0.25`.

    Raises:
      InputError: if shapes do not go together, an option does not go with the method, the method needs a calibration
        text, or weights are not finite.
    """
    made, bank = _method(method, options), experts
    if made.needs_calibration:
        raise InputError(f"{method} needs a text that a model runs over: use compress, of a whole model")
    moe, d_model, leaves = _bank_leaves(bank) if isinstance(bank, ExpertBank) else _kernel_leaves(bank, activation)
    if router is not None:
        leaves["router/kernel"] = _array("router", router, (d_model, moe.num_experts))
    layer = SourceLayer(_one_layer(moe, d_model, leaves), 0)
    shapes = moe.expert.shapes(d_model)
    dense = None
    if base is not None:
        if made.origin is not None:
            raise InputError(f"base does not go with {method}: it takes the {made.origin}")
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


def _method(name: str, options: Mapping[str, Any]) -> Method:
    given = dict(options)
    if isinstance(given.get("target_bytes"), str):
        given["target_bytes"] = parse_bytes(given["target_bytes"], flag="target_bytes")
    return make_method(name, given)


def _bank_leaves(bank: ExpertBank) -> tuple[MoEConfig, int, dict[str, np.ndarray]]:
    """What a layer of a bank's experts is, its width, and its leaves."""
    state = jax.tree_util.tree_leaves_with_path(nnx.state(bank))
    moe = MoEConfig(expert=bank.expert, num_experts=bank.num_experts, top_k=bank.num_experts, bank=bank.config)
    d_model = bank.kernels(0)["up"].shape[0]
    return moe, d_model, {f"experts/{path_name(path)}": np.asarray(leaf) for path, leaf in state}


def _kernel_leaves(kernels: Mapping[str, Any], activation: Activation) -> tuple[MoEConfig, int, dict[str, np.ndarray]]:
    """The same of kernels."""
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
    """A model of one layer, of which nothing is there but `mlp`."""
    attention = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=2)
    layers = (LayerConfig(attention=attention, mlp=mlp),)
    config = ModelConfig(family="llama", vocab_size=1, d_model=d_model, max_positions=1, layers=layers)
    # Deltas without a base are stored in the dtype of the layer's norm.
    norm = np.ones(d_model, np.float32)
    named = {f"layers/0/mlp/{path}": leaf for path, leaf in leaves.items()}
    return ModelInMemory(config, LeavesInMemory(named | {"layers/0/attention_norm/scale": norm}))


def _make_bank(moe: MoEConfig, d_model: int, leaves: Mapping[str, np.ndarray]) -> ExpertBank:
    """The bank of an MoE layer, from its leaves."""

    def make(rngs: nnx.Rngs) -> ExpertBank:
        return make_bank(moe.bank, moe.expert, moe.bank_experts, d_model, rngs=rngs, dtype=jnp.dtype(jnp.float32))

    graphdef, state = nnx.split(shapes_of(make))
    filled = jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(leaves[f"experts/{path_name(path)}"]), state)
    return nnx.merge(graphdef, filled)
