"""Splits a model into trained and frozen parameters. The frozen ones have no gradient and no optimizer state.

Patterns are written against the leaf paths of a model directory, one per parameter and layer
(`layers/3/mlp/router/kernel`), and must match a whole path: `router` alone matches nothing, so that nothing is
trained or frozen by accident.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

import jax
from flax import nnx

from moe_jax.core.errors import InputError, clipped, nearest, raise_if_any, shown
from moe_jax.distributed.sharding import path_name
from moe_jax.experts import ExpertBank
from moe_jax.model_io.loading import disk_paths
from moe_jax.model_io.tuned_base import own_leaves
from moe_jax.nn import Decoder

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
      train, freeze: regular expressions that must match whole leaf paths. Without `train`, all parameters are trained;
        in a model with a frozen base, only those that the base does not have: adapters, LoRA, and adapters' routers.

    Raises:
      InputError: for a pattern that is not a regular expression, takes too long, matches nothing, or matches only some
        of the layers that are stacked into one array; or if nothing is left to train.
    """
    leaves = {path: disk_paths(model.config, path) for path in _paths(nnx.state(model, nnx.Param))}
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

    if train is not None:
        candidates = matching(train)
    else:
        candidates = set(own_leaves(model.config)) if model.config.frozen_base else set(every)
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
