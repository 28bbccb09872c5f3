"""Selects the parameters of a model that are trained, splits them from the frozen ones, and shows them in a table.

Frozen ones have no gradient and no optimizer state. Patterns are written against the leaf paths of a model directory,
one per parameter and layer (`layers/3/mlp/router/kernel`), and must match a whole path: `router` alone matches nothing,
so that nothing is trained or frozen by accident.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import rich.console
import rich.table
from flax import nnx

from moe_jax.core.errors import InputError, clipped, nearest, raise_if_any, shown
from moe_jax.core.formatting import index_set, is_parameter
from moe_jax.distributed.sharding import path_name
from moe_jax.experts import ExpertBank
from moe_jax.model_io.loading import FURTHER, TOWER, disk_paths, leaf_specs
from moe_jax.model_io.tuned_base import own_leaves, with_nf4
from moe_jax.model_io.without_codes import weights_in_codes
from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder


def parameter_sizes(config: ModelConfig) -> dict[str, int]:
    """Returns leaf path -> number of parameters.

    Positions of sparse deltas and codes of quantised ones are not parameters. An NF4 kernel counts as the kernel that
    it was quantised from, under that kernel's path; its scales are not counted. The scales of a shared base in other
    codes are parameters.
    """
    specs = leaf_specs(with_nf4(config, False))
    counted = {path: spec for path, spec in specs.items() if is_parameter(spec) and "/coded_nf4/" not in path}
    return {path: math.prod(spec.shape) for path, spec in counted.items()}


def active_size(config: ModelConfig, path: str, size: int) -> int:
    """Returns the number of parameters, out of `size` of a leaf, that are active for one token.

    All of them, except for leaves with one part per expert or adapter: of these, the parts that the router chooses for
    a token (PERFT-S and D: all; E: k of E; R: K of M). Routers are active as a whole. Those that see are for pictures
    alone, and further layers no part of what the model computes for its next token.
    """
    if path.startswith("vision/"):
        return 0
    if path.startswith(FURTHER):
        return 0
    if "/mlp/perft/adapters/" in path:
        moe = config.moe(int(path.split("/")[1]))
        assert moe.perft is not None
        return size // moe.perft.num_experts * moe.perft_top_k
    if "/mlp/experts/" not in path or "/mlp/experts/base/" in path:
        return size
    moe = config.moe(int(path.split("/")[1]))
    return size // moe.bank_experts * min(moe.bank_top_k, moe.bank_experts)


_LAYER = re.compile(rf"({TOWER}|)layers/(\d+)/")


class ParameterGroup(NamedTuple):
    """A parameter, summed over all layers that have it."""

    pattern: str  # leaf path with a set of layers, such as `layers/{0..4..2}/mlp/router/kernel`
    size: int  # number of parameters
    active: int  # how many of them are active for one token


def trained_groups(config: ModelConfig, trained: Collection[str]) -> list[ParameterGroup]:
    """Returns the parameters at the paths `trained`, as on disk, grouped over layers, in the order of the model."""
    sizes = parameter_sizes(config)
    folded: dict[str, list[str]] = {}
    for path in sizes:
        if path in trained:
            folded.setdefault(_LAYER.sub(r"\1layers/*/", path), []).append(path)
    return [
        ParameterGroup(
            pattern=_pattern(paths),
            size=sum(sizes[path] for path in paths),
            active=sum(active_size(config, path, sizes[path]) for path in paths),
        )
        for paths in folded.values()
    ]


def print_trained(console: rich.console.Console, config: ModelConfig, trained: Collection[str]) -> None:
    """Prints which parameters will be trained, those at the paths `trained`, as on disk.

    Patterns, counts and shares of the model are shown, and whether routers are included.
    """
    sizes, groups, coded = parameter_sizes(config), trained_groups(config, trained), weights_in_codes(config)
    total, active = sum(sizes.values()), sum(group.active for group in groups)
    count = sum(group.size for group in groups)
    table = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    # A list of layers has no spaces at which it could wrap, and would be cut off.
    table.add_column("will be trained", overflow="fold")
    for column in ("parameters", "active", "of the model"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in groups:
        table.add_row(group.pattern, f"{group.size:,}", f"{group.active:,}", _percent(group.size, total))
    lines = [
        f"trained: {count:,} of {total:,} parameters ({_percent(count, total)}), {active:,} of them active per token",
        *([f"frozen: {total - count:,} parameters{_as_nf4(config, sizes)}"] if count < total else []),
        *([f"in codes: {coded:,} weights, whose codes stay as they are{_of_scales(trained)}"] if coded else []),
        *_router_lines(config, sizes, trained),
    ]
    console.print(table, highlight=False)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _of_scales(trained: Collection[str]) -> str:
    learnt = any(path.endswith(("/scales", "/row_scales", "/scale_steps")) for path in trained)
    return "; what is trained of them is their scales" if learnt else ", and so do their scales"


def _router_lines(config: ModelConfig, sizes: Mapping[str, int], trained: Collection[str]) -> list[str]:
    """Returns lines that say whether the model's routers, and routers of adapters, are trained."""
    own = own_leaves(config)
    # Biases of selection are moved, and not trained.
    routers = [path for path in sizes if "/router/" in path and not path.startswith(FURTHER)]
    routers = [path for path in routers if not path.endswith("/selection_bias")]
    lora = [path for path in routers if "/lora/" in path]
    choosing = [path for path in routers if path in own and path not in lora]
    models = [path for path in routers if path not in own]
    lines = []
    if models:
        itself, beside = _how_many(models, trained), ""
        if any(path in trained for path in lora):
            beside = ", but LoRA beside it is" if itself == "no" else ", and so is LoRA beside it"
        lines.append(f"the router is among them: {itself}{beside}")
    idle = {int(path.split("/")[1]) for path in [*models, *lora] if path in trained}
    idle = {layer for layer in idle if not config.moe(layer).router_learns}
    if idle:
        layers = index_set(idle)
        lines.append(
            f"the router of layers {layers} learns nothing from the task: one expert per token has weight 1 whatever "
            "the router says (top_k 1 and weights that sum to 1), and auxiliary losses alone train it"
        )
    if choosing:
        lines.append(f"the adapters' own router is among them: {_how_many(choosing, trained)}")
    return lines


def _how_many(paths: Sequence[str], trained: Collection[str]) -> str:
    inside = [path in trained for path in paths]
    return "yes" if all(inside) else "some" if any(inside) else "no"


def _as_nf4(config: ModelConfig, sizes: Mapping[str, int]) -> str:
    missing = sizes.keys() - leaf_specs(config).keys()
    return f", {sum(sizes[path] for path in missing):,} of them as NF4 codes" if missing else ""


def _percent(part: int, total: int) -> str:
    """Returns a share in percent, with enough digits that a small share does not read 0."""
    share = part / total
    return f"{share:.2%}" if share >= 0.001 or not part else f"{100 * share:.2g}%"


def _pattern(paths: Sequence[str]) -> str:
    found = [match for path in paths if (match := _LAYER.match(path))]
    if not found:
        return paths[0]
    layers = index_set(int(match[2]) for match in found)
    return f"{found[0][1]}layers/{layers}/{paths[0][found[0].end() :]}"


_SECONDS = 1  # of processor time, for all patterns; they take milliseconds
_BYTES = 1 << 30
_LONGEST_WAIT = 60  # seconds by the clock, on a machine that is busy
_PROGRAM = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        match = re.compile(pattern).fullmatch
    except Exception as error:
        print(json.dumps(f"is not a regular expression: {{error}}"), flush=True)
    else:
        print(json.dumps([i for i, name in enumerate(names) if match(name)]), flush=True)
"""


def full_matches(patterns: Sequence[str], names: Sequence[str]) -> list[set[str] | str]:
    """Returns for each pattern the names that it matches as a whole, or a text that says what is wrong with it.

    Patterns after one that takes too long have no entry.
    """
    if not patterns:
        return []
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([list(patterns), list(names)]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_LONGEST_WAIT,
        )
        printed = ran.stdout
    except subprocess.TimeoutExpired as expired:
        printed = expired.output or b""
    found: list[set[str] | str] = []
    for line in printed.splitlines(keepends=True):
        if line.endswith(b"\n"):
            answer = json.loads(line)
            found.append(answer if isinstance(answer, str) else {str(names[i]) for i in answer})
    if len(found) < len(patterns):
        found.append("takes too long to match; write it without repetitions inside repetitions")
    return found


def trainable_paths(
    model: Decoder, *, train: Sequence[str] | None = None, freeze: Sequence[str] = ()
) -> frozenset[str]:
    """Returns the paths in memory (`stack/segments/0/blocks/1/...`) of the parameters that are trained.

    A parameter is trained if it matches a pattern of `train` and none of `freeze`. Integer leaves, NF4 kernels, and
    leaves that a bank itself freezes (the base, with `train_base=False`) are never trained.

    Args:
      model: a model, which may be abstract.
      train, freeze: regular expressions that must match whole leaf paths. Without `train`, all parameters are trained
        but those of an image encoder and of further layers; in a model with a frozen base, only those that the base
        does not have: adapters, LoRA, and adapters' routers.

    Raises:
      InputError: for a pattern that is not a regular expression, takes too long, matches nothing, or matches only some
        of the layers that are stacked into one array; or if nothing is left to train.
    """
    leaves = {path: disk_paths(model.config, path, model=model) for path in _paths(nnx.state(model, nnx.Param))}
    every = [name for names in leaves.values() for name in names]
    problems: list[str] = []

    def matching(patterns: Sequence[str]) -> set[str]:
        matched: set[str] = set()
        for pattern, hits in zip(patterns, full_matches(patterns, every), strict=False):
            if isinstance(hits, str):
                problems.append(f"{shown(pattern)} {clipped(hits)}")
                continue
            if not hits:
                problems.append(f"{shown(pattern)} matches no parameter{nearest(pattern, every)}")
            matched |= hits
        return matched

    if isinstance(train, str) or isinstance(freeze, str):
        raise InputError("train and freeze are lists of patterns, such as ['.*/router/.*']")
    if train is not None:
        candidates = matching(train)
    else:
        candidates = set(own_leaves(model.config)) if model.config.frozen_base else set(every)
        candidates = {name for name in candidates if not name.startswith((TOWER, FURTHER))}
    chosen = candidates - matching(freeze)
    raise_if_any(problems, "partition (a pattern must match a whole leaf path)")
    for names in leaves.values():
        inside = [name for name in names if name in chosen]
        if inside and len(inside) < len(names):
            outside = next(name for name in names if name not in chosen)
            problems.append(
                f"{inside[0]} would be trained and {outside} not, but equal layers are stacked into one array and "
                "are trained or frozen together"
            )
    raise_if_any(problems, "partition")
    held = _frozen_by_their_bank(model)
    trained = frozenset(path for path, names in leaves.items() if names[0] in chosen and path not in held)
    if not trained:
        raise InputError("partition: no parameter is left to train")
    return trained


def split_model(model: Decoder, trainable: frozenset[str]) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Splits a model into `(graphdef, trained, frozen)`, which `nnx.merge` joins again.

    The two states hold disjoint leaves of the model's state, under the same paths:

        {embed: {embedding}, segments: ...}  ->  {embed: {embedding}}, {segments: ...}
    """

    def is_trainable(path: tuple, _: object) -> bool:
        return "/".join(str(key) for key in path) in trainable

    graphdef, trained, frozen = nnx.split(model, is_trainable, ...)
    return graphdef, trained, frozen


def _paths(state: nnx.State) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]


def _frozen_by_their_bank(model: Decoder) -> set[str]:
    held = set()
    for path, module in nnx.iter_modules(model):
        if isinstance(module, ExpertBank):
            prefix = "".join(f"{key}/" for key in path)
            frozen = module.frozen_leaves()
            held |= {prefix + leaf for leaf in _paths(nnx.state(module)) if frozen.match(leaf)}
    return held
