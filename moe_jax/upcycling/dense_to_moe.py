"""Makes an MoE of a dense model (methods.md 2, 6): its config first, then its leaves, layer by layer.

Of a model that is an MoE already, `larger_moe` makes a larger one.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from moe_jax.checks.step0 import Probe, ProbeText
from moe_jax.core.errors import InputError, flag_of, raise_if_any
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.processes import check_equal, first_decides
from moe_jax.experts.shapes import FFNConfig
from moe_jax.files.byte_files import fingerprint_files
from moe_jax.files.staging import check_target
from moe_jax.files.storage_path import as_path
from moe_jax.functional.routing.gates import GATES
from moe_jax.model_io.in_memory import Destination, ModelWriter, open_writer
from moe_jax.model_io.leaves_to_write import dealt
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.tuned_base import LeavesOverBase, base_leaf, is_tuned, kernel_of, own_leaves
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig, config_to_json
from moe_jax.models.own_parts import LINEAR
from moe_jax.peft.adapt import initial_leaf
from moe_jax.upcycling.beginnings import Branches, Prompt, router_kernels
from moe_jax.upcycling.copied_experts import larger_config
from moe_jax.upcycling.expert_leaves import MATRICES, moe_leaves, output_scale
from moe_jax.upcycling.larger_moe import make_larger
from moe_jax.upcycling.outcome import Specs, Upcycled, measured_of, sizes_of
from moe_jax.upcycling.router_file import LinearRouter, read_router
from moe_jax.upcycling.spec import DenseParameters, UpcycleSpec


def upcycle(
    source: ModelSource,
    dst: Destination,
    spec: UpcycleSpec,
    *,
    text: ProbeText | None = None,
    experts_from: Sequence[ModelSource] = (),
    prompts: Sequence[Prompt] = (),
    demand: Mapping[int, Float[np.ndarray, " E"]] | None = None,
    progress: Progress = no_progress,
) -> Upcycled:
    """Makes an MoE of a dense model, or a larger one of an MoE. One layer at a time is in memory.

    If several processes make the same call, each makes its own layers. The first compares the models, layer after
    layer, and the others wait. The output is a model directory, or for adapter experts over a frozen model (PESC) an
    adapter directory that refers to the source.

    Args:
      source, dst: the model, and the directory to write, or memory.
      spec: the MoE to make. With `step0_check` the logits of the written model are compared with the source's before
        it appears at `dst`; if they are not meant to be equal, the difference is only measured.
      experts_from: the models that `spec.experts_from` names; leaves get the source's dtypes.
      prompts: texts that the routers are made from, one for each copy of the FFN; none: routers are random.
      text: for a model with NF4 kernels, a text on which the change of its predictions is measured.
      demand: of an MoE, by layer, how much each expert calls for copies, as `spec.copies_by` says (`measure_demand`).
      progress: called after every layer.

    Returns:
      The sizes, and in the first process the results of the comparison.

    Raises:
      InputError: if the options do not fit the source, `dst` exists, weights are not finite, the check does not fit
        into this machine's memory, or the logits differ. Nothing is left behind.
      OSError: if the disk is full. The same call goes on with what is done.
    """
    if isinstance(dst, Path):
        first_decides(lambda: check_target(dst, buckets=True))
    if source.config.moe_layers:
        return make_larger(source, dst, spec, demand=demand, progress=progress)
    config = upcycled_config(source.config, spec)
    assert len(experts_from) == len(spec.experts_from), "the spec names the models"
    branches = Branches(source, experts_from, spec.rest_from or "mean") if experts_from else None
    specs = upcycled_specs(config, source.specs())
    differs = why_different(spec, [specs[path].dtype for path in specs if path.endswith("/down/kernel")])
    if spec.step0_check and not keeps_the_function(spec) and spec.granularity == 1 and spec.universal != "med":
        raise InputError(_why_not_equal(spec))
    described = spec.described()
    routers: dict[int, LinearRouter] = {}
    if prompts:
        raise_if_any(spec.prompt_problems(len(prompts)), "routers from texts")
        described["router_tokens"] = [prompt.fingerprint() for prompt in prompts]
        kernels = router_kernels(source, prompts, config.moe_layers, progress)
        routers = {layer: LinearRouter(kernel) for layer, kernel in kernels.items()}
    if spec.router_weights is not None:
        file = as_path(spec.router_weights)
        router = read_router(file, config.moe(config.moe_layers[0]), config.d_model)
        routers = dict.fromkeys(config.moe_layers, router)
        described["router_weights_sha256"] = fingerprint_files([file])
    sources = [source, *experts_from]
    lineage = [*source.lineage, first_decides(lambda: new_lineage_entry("upcycle", described, sources))]
    check_equal({"the options": {name: str(value) for name, value in described.items()}, "seed": spec.seed})
    check_equal({"the new model": config_to_json(config)})
    base = source if config.frozen_base else None
    writer = open_writer(
        dst,
        config,
        base=base,
        tokenizer_files=source.tokenizer_files,
        lineage=lineage,
        resume=True,
        allow_nonfinite=spec.allow_nonfinite,
    )
    probe: Probe | None = None

    def make_probe() -> None:
        nonlocal probe
        probe = Probe(source, config, specs, spec.seed, text=text, allow_nonfinite=spec.allow_nonfinite)

    if spec.step0_check:
        first_decides(make_probe)
    result = Upcycled(config, *sizes_of(source, config, specs), differs=differs)
    with writer:
        if spec.bank.form.beside_base_model:
            _write_adapter_experts(source, config, writer, spec.seed, progress)
        else:
            _write_layers(source, branches, routers, config, spec, writer, progress)
        if spec.step0_check:
            written = writer.read_back()

            def compare() -> None:
                nonlocal result
                assert probe is not None
                read = LeavesOverBase(config, source, written).read if config.frozen_base else written.read
                result = result._replace(**probe.compare(read, progress, may_differ=differs is not None)._asdict())

            first_decides(compare)
        writer.lineage[-1]["measured"] = measured_of(result)
    return result


def _why_not_equal(spec: UpcycleSpec) -> str:
    return (
        f"gate {spec.weighting!r} with top_k={spec.chosen} of {spec.copies} experts has weights that do not sum to 1: "
        "the MoE cannot equal the dense model at step 0; use gate 'topk_softmax', or --no-step0-check if that is meant"
    )


def upcycled_specs(config: ModelConfig, dense: Mapping[str, jax.ShapeDtypeStruct]) -> Specs:
    """Returns the shapes and dtypes of the leaves that are written.

    Leaves of the dense model, whose specs are given as stored, keep their dtypes; new leaves have those of the FFN,
    except that adapters and LoRA have that of the config.
    """
    tuned = is_tuned(config)

    def stored(path: str, spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if path in dense:
            return dense[path]
        if tuned:
            source = base_leaf(config, path)
            return spec if source is None or kernel_of(path) is not None else dense[source]
        if not jnp.issubdtype(spec.dtype, jnp.floating):
            return spec
        layer, below = path.split("/mlp/")
        matrix = next((name for name in MATRICES if f"/{name}/" in below), "up")
        kind = "bias" if below.endswith("/bias") and not below.startswith("router/") else "kernel"
        return jax.ShapeDtypeStruct(spec.shape, dense[f"{layer}/mlp/{matrix}/{kind}"].dtype)

    return {path: stored(path, spec) for path, spec in leaf_specs(config).items()}


def _write_layers(
    source: ModelSource,
    branches: Branches | None,
    routers: Mapping[int, LinearRouter],
    config: ModelConfig,
    spec: UpcycleSpec,
    writer: ModelWriter,
    progress: Progress,
) -> None:
    read = source.read if branches is None else branches.read
    by_layer, new = _by_layer(leaf_specs(source.config)), _by_layer(writer.expected)

    def copy(paths: Iterable[str]) -> None:
        for path in paths:
            if path not in writer.done and writer.mine(path):
                writer.write({path: read(path)})

    upcycled = {str(i) for i in config.moe_layers}
    _deal(writer, upcycled, leaf_specs(config))
    copy(by_layer.pop(""))
    for done, (layer, paths) in enumerate(by_layer.items(), start=1):
        prefix = f"layers/{layer}/mlp/"
        replaced = [path for path in paths if path.startswith(prefix)] if layer in upcycled else []
        copy(path for path in paths if path not in replaced)
        missing = [path for path in new[layer] if path not in writer.done and writer.mine(path)]
        if replaced and any(path.startswith(prefix) for path in missing):
            names = [path.removeprefix(prefix) for path in replaced]
            ffn: Mapping[str, np.ndarray] = {name: read(prefix + name) for name in names} if branches is None else {}
            copies: list[Mapping[str, np.ndarray]] = []
            if branches is not None:  # of which no more than a leaf of each should be in memory
                ffn, copies = branches.ffn(prefix, names), branches.ffns(prefix, names)
            index = int(layer)
            given = {"branches": copies, **_of_router(routers.get(index))}
            for name, leaf in moe_leaves(ffn, config.moe(index), spec, layer=index, **given):
                if prefix + name not in writer.done:
                    writer.write({prefix + name: leaf})
        progress("writing layers", done, len(by_layer))


def _of_router(given: LinearRouter | None) -> dict[str, np.ndarray | None]:
    """Returns the arguments of `moe_leaves` for a router."""
    return {} if given is None else {"router": given.kernel, "router_bias": given.bias}


def _deal(writer: ModelWriter, layers: Collection[str], specs: Specs) -> None:
    """Assigns leaves to processes: all leaves of an MoE to one, which reads its FFN once; other leaves one by one."""

    def piece(path: str) -> str:
        names = path.split("/")
        return "/".join(names[:3]) if names[0] == "layers" and names[1] in layers and names[2] == "mlp" else path

    sizes: dict[str, int] = {}
    missing = [path for path in writer.expected if path not in writer.done]
    for path in missing:
        sizes[piece(path)] = sizes.get(piece(path), 0) + specs[path].size * specs[path].dtype.itemsize
    owners = dealt(sizes)
    writer.deal({path: owners[piece(path)] for path in missing})


def _write_adapter_experts(
    source: ModelSource, config: ModelConfig, writer: ModelWriter, seed: int, progress: Progress
) -> None:
    """Writes the new leaves, and the dense model's unless the directory refers to them."""
    own, specs = own_leaves(config), leaf_specs(config)
    by_layer = _by_layer(path for path in specs if path in own or not config.frozen_base)
    for done, paths in enumerate(by_layer.values(), start=1):
        for path in paths:
            if path in writer.done or not writer.mine(path):
                continue
            of_base = base_leaf(config, path)
            leaf = initial_leaf(path, specs[path], seed) if of_base is None else source.read(of_base)
            writer.write({path: leaf})
        progress("writing layers", done, len(by_layer))


def _by_layer(paths: Iterable[str]) -> dict[str, list[str]]:
    """Returns the paths of leaves by their layer's index; leaves outside the layers are under ""."""
    by_layer: dict[str, list[str]] = {}
    for path in paths:
        by_layer.setdefault(path.split("/")[1] if path.startswith("layers/") else "", []).append(path)
    return by_layer


def upcycled_config(dense: ModelConfig, spec: UpcycleSpec) -> ModelConfig:
    """Returns the config of the MoE made from a dense model, or that of the larger one made from an MoE.

    The FFNs of the chosen layers are replaced by MoEs whose experts have the FFN's shape or, with granularity G, a G-th
    of its neurons; and `spec.dense_parameters` hold in all layers.

    Raises:
      InputError: if the model already has adapters, or the options do not fit it; all problems are listed.
    """
    dense.check_no_further("upcycling")
    if is_tuned(dense):
        raise InputError("the model has adapters or NF4 kernels already; merge them first, or upcycle its base")
    if dense.moe_layers:
        return larger_config(dense, spec)
    problems = [f"{flag_of(name)} is for an MoE, of which a larger one is made" for name in spec.of_moe()]
    chosen = _chosen_layers(dense, spec, problems)
    layers = list(dense.layers)
    # If no layer could be chosen, the first one is used to find problems with the MoE itself.
    for i in sorted(chosen) or _with_ffn(dense)[:1]:
        try:
            layers[i] = dataclasses.replace(layers[i], mlp=_moe(dense, i, spec))
        except InputError as error:
            problems.append(str(error))
            break  # equal layers have equal problems, so one of them is checked
    raise_if_any(problems, "these options do not go with the model")
    return with_rest(dataclasses.replace(dense, layers=tuple(layers)), spec.dense_parameters)


def keeps_the_function(spec: UpcycleSpec) -> bool:
    """Whether the weights of a token's FFNs sum to 1, so that equal ones add up to the dense FFN (methods.md 2.5)."""
    if spec.universal != "none":
        return spec.universal == "coder"
    if spec.weighting in GATES and GATES[spec.weighting].weights_sum_to_one:
        return True
    return spec.weighting in ("softmax_topk", "top1") and spec.chosen == spec.copies


def why_different(spec: UpcycleSpec, dtypes: Collection[np.dtype] = ()) -> str | None:
    """Returns why the MoE is not meant to begin with the dense model's logits; None: it is, if it `keeps_the_function`.

    The `dtypes` are those in which the FFN's down kernels are stored.
    """
    reasons = []
    if spec.universal == "med":
        reasons.append("universal 'med' adds the experts to the FFN, by weights above 0")
    if len(spec.experts_from):
        reasons.append(f"experts from {len(spec.experts_from)} models")
    if spec.noise:
        reasons.append(f"noise {spec.noise:g} on the experts")
    if spec.drop:
        reasons.append(f"share {spec.drop:g} of the experts' neurons drawn anew")
    if spec.capacity_factor is not None and spec.capacity_rows is None:
        reasons.append(f"tokens beyond capacity_factor {spec.capacity_factor:g}, which pass layers by")
    if spec.granularity > 1:
        pieces = spec.granularity
        scale = output_scale(spec.weighting, spec.copies * pieces, spec.chosen * pieces, pieces)
        if not keeps_the_function(spec):
            reasons.append(f"outputs scaled by {scale:g}, as if the router found all experts alike")
        if math.frexp(scale)[0] != 0.5 and any(dtype != np.float32 for dtype in dtypes):
            reasons.append(f"down kernels times {scale:g} are rounded")
    return " and ".join(reasons) or None


def _with_ffn(dense: ModelConfig) -> list[int]:
    """Returns the indices of the layers that have an FFN: all, but in models whose layers have one branch each."""
    return [i for i, layer in enumerate(dense.layers) if "mlp" in layer.branches]


def _chosen_layers(dense: ModelConfig, spec: UpcycleSpec, problems: list[str]) -> set[int]:
    num_layers, with_ffn = dense.num_layers, _with_ffn(dense)
    if spec.layers is not None:
        outside = sorted(i for i in set(spec.layers) if not 0 <= i < num_layers)
        if not spec.layers:
            problems.append("no layers are named; name some, or use every")
        if outside:
            problems.append(f"layers {_some(outside)} do not exist; the model has layers 0 to {num_layers - 1}")
        without = sorted({*spec.layers} - {*outside, *with_ffn})
        if without:
            problems.append(f"layers {_some(without)} have no FFN that could become an MoE")
        return set(spec.layers) - {*outside, *without}
    # An encoder's layers and a decoder's are counted apart, and those without an FFN not at all.
    first = dense.num_encoder_layers
    stacks = [i for i in with_ffn if i < first], [i for i in with_ffn if i >= first]
    most = max(map(len, stacks))
    if not 1 <= spec.every_nth <= most:
        problems.append(f"every={spec.every_nth} must lie between 1 and the number of layers, {most}")
        return set()
    begin = spec.every_nth - 1 if spec.first is None else spec.first
    if not 0 <= begin < most:
        problems.append(f"first={begin} is not one of the layers 0 to {most - 1}")
        return set()
    return {i for stack in stacks for i in stack[begin :: spec.every_nth]}


def _moe(dense: ModelConfig, layer: int, spec: UpcycleSpec) -> MoEConfig:
    expert, pieces = dense.ffn(layer), spec.granularity
    if pieces > 1:
        problems = []
        if expert.dim % pieces:
            problems.append(f"granularity={pieces} does not divide the {expert.dim} neurons of the FFN")
        if spec.universal != "none":
            problems.append(f"granularity={pieces} does not go with a universal FFN, which weights whole experts")
        if spec.weighting not in ("topk_softmax", "softmax_topk"):
            gates = "'topk_softmax' or 'softmax_topk'"
            problems.append(f"granularity={pieces} goes with gate {gates}, not {spec.weighting!r}")
        raise_if_any(problems, f"layer {layer}")
    expert = dataclasses.replace(expert, dim=expert.dim // pieces)
    moe = MoEConfig(
        expert=expert,
        num_experts=spec.copies * pieces,
        top_k=spec.chosen * pieces,
        gate=spec.weighting,
        router=spec.router or LINEAR,
        bank=spec.bank,
        router_bias=spec.router_bias,
        balance_coef=spec.balance_coef,
        balance_choices=spec.balance_choices,
        z_coef=spec.z_coef,
        cv_coef=spec.cv_coef,
        capacity_factor=spec.capacity_factor,
        capacity_rows=spec.capacity_rows,
        universal=spec.universal,
        extended=spec.extended,
    )
    spec.bank.check_fits(expert, dense.d_model)
    if not moe.router_learns:
        others = ", a universal FFN 'coder', or gate 'top1' or 'softmax_topk'"
        others = "" if spec.bank.form.needs_unit_weights else others
        raise InputError(
            f"top_k=1 with gate {spec.weighting!r} weights an expert by 1 whatever the router says, which then learns "
            f"nothing from the task; use top_k=2{others}"
        )
    return moe


def with_rest(config: ModelConfig, rest: DenseParameters) -> ModelConfig:
    """Returns the config with `rest` applied to attention and FFN (in an MoE, the experts' FFN) of every layer."""
    if rest.kind == "full":
        return config
    layers = tuple(_treated(layer, rest) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, frozen_base=True)


def _treated(layer: LayerConfig, rest: DenseParameters) -> LayerConfig:
    nf4 = rest.kind == "qlora"
    attention = dataclasses.replace(layer.attention, nf4=nf4, lora=rest.lora(layer.attention.projections))

    def ffn(config: FFNConfig) -> FFNConfig:
        return dataclasses.replace(config, nf4=nf4, lora=rest.lora(config.matrices))

    mlp = layer.mlp
    changed = dataclasses.replace(mlp, expert=ffn(mlp.expert)) if isinstance(mlp, MoEConfig) else ffn(mlp)
    return dataclasses.replace(layer, attention=attention, mlp=changed)


def _some(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers[:4]))
    return shown if len(layers) <= 4 else f"{shown}, ..."
