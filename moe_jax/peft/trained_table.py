"""The table of parameters that will be trained, which `adapt`, `upcycle` and `train` print."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import rich.console
import rich.table

from moe_jax.core.formatting import index_set, is_parameter
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.tuned_base import own_leaves, with_nf4
from moe_jax.models import ModelConfig, MoEConfig


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
    a token (PERFT-S and D: all; E: k of E; R: K of M). Routers are active as a whole.
    """
    if "/mlp/perft/adapters/" in path:
        moe = config.moe(int(path.split("/")[1]))
        assert moe.perft is not None
        return size // moe.perft.num_experts * moe.perft_top_k
    if "/mlp/experts/" not in path or "/mlp/experts/base/" in path:
        return size
    moe = config.moe(int(path.split("/")[1]))
    return size // moe.bank_experts * min(moe.bank_top_k, moe.bank_experts)


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
            folded.setdefault(re.sub(r"^layers/\d+/", "layers/*/", path), []).append(path)
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
    sizes, groups = parameter_sizes(config), trained_groups(config, trained)
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
        *_router_lines(config, sizes, trained),
    ]
    console.print(table, highlight=False)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _router_lines(config: ModelConfig, sizes: Mapping[str, int], trained: Collection[str]) -> list[str]:
    """Returns lines that say whether the model's routers, and routers of adapters, are trained."""
    own = own_leaves(config)
    routers = [path for path in sizes if "/router/" in path]
    lora = [path for path in routers if "/lora/" in path]
    choosing = [path for path in routers if path in own and path not in lora]
    models = [path for path in routers if path not in own]
    lines = []
    if models:
        itself, beside = _how_many(models, trained), ""
        if any(path in trained for path in lora):
            beside = ", but LoRA beside it is" if itself == "no" else ", and so is LoRA beside it"
        lines.append(f"the router is among them: {itself}{beside}")
    idle = [path for path in [*models, *lora] if path in trained and not _moe_of(config, path).router_learns]
    if idle:
        layers = index_set({int(path.split("/")[1]) for path in idle})
        lines.append(
            f"the router of layers {layers} learns nothing from the task: one expert per token has weight 1 whatever "
            "the router says (top_k 1 and weights that sum to 1), and auxiliary losses alone train it"
        )
    if choosing:
        lines.append(f"the adapters' own router is among them: {_how_many(choosing, trained)}")
    return lines


def _moe_of(config: ModelConfig, path: str) -> MoEConfig:
    """Returns the MoE layer that a leaf of a router belongs to."""
    moe = config.layers[int(path.split("/")[1])].mlp
    assert isinstance(moe, MoEConfig)
    return moe


def _how_many(paths: Sequence[str], trained: Collection[str]) -> str:
    inside = [path in trained for path in paths]
    return "yes" if all(inside) else "some" if any(inside) else "no"


def _as_nf4(config: ModelConfig, sizes: Mapping[str, int]) -> str:
    """Says how many of the parameters are stored as NF4 codes."""
    missing = sizes.keys() - leaf_specs(config).keys()
    return f", {sum(sizes[path] for path in missing):,} of them as NF4 codes" if missing else ""


def _percent(part: int, total: int) -> str:
    """Returns a share in percent, with enough digits that a small share does not read 0."""
    share = part / total
    return f"{share:.2%}" if share >= 0.001 or not part else f"{100 * share:.2g}%"


def _pattern(paths: Sequence[str]) -> str:
    if not paths[0].startswith("layers/"):
        return paths[0]
    layers = index_set(int(path.split("/")[1]) for path in paths)
    return f"layers/{layers}/{paths[0].split('/', 2)[2]}"
