"""Compression of a model, and of the experts of one layer."""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from moe_jax.api.calibrate import calibrate as record_calibration
from moe_jax.api.calibrate import open_calibration
from moe_jax.api.model import Loading, Model, ModelOrPath, OutPath, destination, open_model, result
from moe_jax.api.run import read_ids, score
from moe_jax.api.verb import model_verb, work_bars
from moe_jax.compression import Calibration, Method, Score, Sweep
from moe_jax.compression import compress as _compress
from moe_jax.compression import sweep as _sweep
from moe_jax.compression.methods.interface import Base
from moe_jax.compression.report import LayerFigures
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.spec import CompressSpec, MethodOption, SweepSpec, parse_layers
from moe_jax.compression.stream import OnLayer, check_before_calibration, choose_layers
from moe_jax.core.errors import InputError
from moe_jax.core.finite import check_finite
from moe_jax.core.terminal import shows_work
from moe_jax.distributed.processes import first_decides
from moe_jax.distributed.sharding import make_mesh, path_name
from moe_jax.experts import BankConfig, ExpertBank, make_bank
from moe_jax.experts.shapes import shapes_of
from moe_jax.files.staging import check_target
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.in_memory import CastSource, LeavesInMemory, ModelInMemory
from moe_jax.model_io.model_source import ModelLike, ModelSource
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig

P = ParamSpec("P")
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Kernels = ExpertBank | Mapping[str, Float[np.ndarray, "E i o"]]


class CompressVerb(Protocol[P]):
    """The type of `compress`; `P` are the fields of `CompressSpec`."""

    @overload
    def __call__(self, model: ModelOrPath, out: OutPath, spec: CompressSpec, /) -> Model: ...
    @overload
    def __call__(self, model: ModelOrPath, out: OutPath = None, *args: P.args, **kwargs: P.kwargs) -> Model: ...
    @overload
    def __call__(
        self,
        model: ModelOrPath,
        out: OutPath = None,
        *,
        method: str,
        **options: MethodOption | Sequence[int] | ModelLike,
    ) -> Model: ...


def _typed(spec: Callable[P, CompressSpec], verb: object) -> CompressVerb[P]:
    del spec
    return cast(CompressVerb[P], verb)


def compress_model(
    model: ModelOrPath,
    out: OutPath,
    spec: CompressSpec,
    *,
    on_layer: OnLayer = lambda layer, figures, nbytes: None,
) -> Model:
    """Does what `compress` does; `on_layer` is called with every layer that is done."""
    name, method = spec.named_method()
    target = destination(out)
    job = _Job.of(model, spec, [method])
    with work_bars() as progress:
        report = _compress(
            job.source,
            target,
            method,
            described=job.described | {"method": name, **dataclasses.asdict(method)},
            progress=progress,
            on_layer=on_layer,
            **job.shared,
        )
    return result(target, model, report)


@model_verb(CompressSpec)
def _compress_verb(model: ModelOrPath, out: OutPath, spec: CompressSpec) -> Model:
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
      spec: the options.
      keep, bits, ...: options of the method, which are the fields of its class; `moe-jax compress --help` lists them.

    Returns:
      The smaller model. Errors and bytes of every layer are in the last entry of its lineage.

    Raises:
      FileNotFoundError: if there is nothing at a path.
      InputError: if the model has no experts, an option does not go with it or the method, weights are not finite, or
        `out` exists. Nothing is left behind.
      OSError: if the disk is full. Finished layers stay beside `out`, and the same call goes on after them.
    """
    return compress_model(model, out, spec)


_compress_verb.__name__ = _compress_verb.__qualname__ = "compress"  # pyright: ignore
compress = _typed(CompressSpec, _compress_verb)


def sweep(
    model: ModelOrPath,
    out: Path,
    methods: Sequence[tuple[str, Method]],
    spec: SweepSpec,
    *,
    given: Mapping[str, Any],
) -> Sweep:
    """Compresses a model by several methods, scores each result on a text, and deletes it.

    Args:
      model: a model with MoE layers, or the path of one.
      out: the folder of results, which must not exist.
      methods: the methods to try, by name.
      spec: the other options.
      given: the options of the methods as the user gave them, to be recorded.

    Raises:
      InputError: as `compress`.
    """
    first_decides(lambda: check_target(out))
    assert spec.text is not None
    job = _Job.of(model, spec, [method for _, method in methods])
    text = as_path(spec.text)
    described = job.described | dict(given) | {"method": list(dict.fromkeys(name for name, _ in methods))}
    described |= {"seq_len": spec.seq_len}
    read = [job.source, *([job.shared["base"]] if job.shared["base"] is not None else []), text]
    read += [] if spec.calibrate is None else [as_path(spec.calibrate)]
    scored_by = _scorer(job.source, spec)
    with work_bars() as progress:
        return _sweep(
            job.source,
            out,
            methods,
            scored_by,
            described=described,
            sources=read,
            progress=progress,
            **job.shared,
        )


class _Job(NamedTuple):
    """The model and the options, checked and read before the first layer is compressed.

    Attributes:
      source: the model, cast if that was asked for.
      shared: arguments of `moe_jax.compression.compress` and `sweep`: base, extended, layers, calibration.
      described: the options as the lineage records them.
    """

    source: ModelSource
    shared: dict[str, Any]
    described: dict[str, Any]

    @classmethod
    def of(cls, model: ModelOrPath, spec: CompressSpec, methods: Sequence[Method]) -> "_Job":
        source = stored = open_model(model, spec.model_base)
        if spec.dtype is not None:
            source = CastSource(source, spec.dtype)
        base = None if spec.base is None else open_model(spec.base)
        layers = parse_layers(spec.layers, source.config) if isinstance(spec.layers, str) else spec.layers
        # This would fail anyway, but only after a long calibration.
        indices = choose_layers(source.config, layers)
        calibration = None
        if spec.calibrate is not None:
            for method in methods:
                check_before_calibration(source, method, indices, extended=spec.extended)
            needed = any(method.needs_sensitivities for method in methods)
            calibration = _calibration(model, stored, spec, sensitivities=needed)
        shared = {"base": base, "extended": spec.extended, "layers": layers, "calibration": calibration}
        return cls(source, shared, spec.described(layers))


def _calibration(model: ModelOrPath, source: ModelSource, spec: CompressSpec, *, sensitivities: bool) -> Calibration:
    """Records the inputs of the experts on the text of the spec.

    The first process records it, on its own devices, and the others read what it wrote: so it does not depend, in the
    last bits, on how many processes there are.
    """
    assert spec.calibrate is not None
    text, folder = as_path(spec.calibrate), _calibration_folder(model, spec)
    if folder is None and jax.process_count() > 1:
        raise InputError("several processes need --calibration-dir: a folder that all of them see")
    kept: list[Calibration] = []

    def make() -> str:
        with work_bars() as progress:
            made = record_calibration(
                source,
                text,
                samples=spec.samples,
                seed=spec.calibration_seed or 0,
                place=None if folder is None else folder.joinpath,
                mesh=model.mesh if isinstance(model, Model) else make_mesh({"data": -1}, jax.local_devices()),
                sensitivities=sensitivities,
                gradients=spec.gradients,
                progress=progress,
                **_windows(source, spec),
            )
        kept.append(made)
        return str(made.folder)

    place = first_decides(make)
    return kept[0] if kept else open_calibration(Path(place), text, source.config.moe_layers, gradients=spec.gradients)


def _calibration_folder(model: ModelOrPath, spec: CompressSpec) -> Path | None:
    """Returns the folder for recordings of the model: beside it if that can be written; None: they are not kept."""
    if spec.calibration_dir is not None:
        return Path(spec.calibration_dir)
    on_disk = None if isinstance(model, Model) else as_path(model).on_disk
    if on_disk is None or not on_disk.is_dir():
        return None
    place = Path(os.path.abspath(on_disk))  # `.` and `..` have no name of their own
    return place.with_name(f"{place.name}.calibration") if os.access(place.parent, os.W_OK) else None


def _scorer(source: ModelSource, spec: SweepSpec) -> Score:
    """Returns a function that scores a model on the text of a sweep, as `evaluate` does."""
    assert spec.text is not None
    ids, windows = read_ids(_over_devices(source), spec.text), _windows(source, spec)
    return lambda model: score(_over_devices(model), ids, **windows).nll


def _over_devices(source: ModelSource) -> Model:
    """Returns a model that is copied to all devices, each of which computes some of the windows."""
    return Model.of_source(source, Loading(mesh=make_mesh({"data": -1})))


def _windows(source: ModelSource, spec: CompressSpec) -> dict[str, Any]:
    """Returns the arguments that say how many tokens the model sees at a time."""
    most = source.config.max_positions
    if spec.seq_len is not None and spec.seq_len > most and shows_work():
        print(f"warning: {source.path} was made for {most} positions, not {spec.seq_len}", file=sys.stderr)
    return {"seq_len": spec.seq_len, "batch_size": 8 if spec.batch_size is None else spec.batch_size}


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
