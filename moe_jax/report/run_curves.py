"""A training run: its recipe, its curves, and how it used its experts."""

import math
import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np
from jaxtyping import Float
from markupsafe import Markup

from moe_jax.figures.plots import Curve, plot_curves, plot_load, plot_use_over_time
from moe_jax.report.elements import code, facts, folded, picture, side_by_side, table
from moe_jax.report.evaluation_files import is_number
from moe_jax.report.subjects import Run
from moe_jax.training.metrics import Record

# Of the steps, the share at the end over which the use of experts is averaged.
_END = 0.1

# Curves that are drawn: title, label of the axis, and keys of the records by what they are called.
_KINDS = (
    ("Loss", "nats per token", {"training": "loss", "held out": "eval_loss", "from the teacher": "distill_loss"}),
    ("Learning rate", "learning rate", {"learning rate": "learning_rate"}),
    ("Norm of the gradient", "norm", {"norm of the gradient": "grad_norm"}),
    ("Speed", "tokens per second", {"tokens per second": "tokens_per_second"}),
    ("Model FLOP utilisation", "share of the peak", {"MFU": "mfu"}),
    ("Losses of the routers", "mean over layers", {"balance": "balance_loss", "z": "z_loss", "cv": "cv_loss"}),
    ("Losses of the adapters' routers", "mean over layers", {"balance": "perft_balance_loss", "z": "perft_z_loss"}),
)


def training_facts(run: Run) -> Markup:
    """The figures that sum a run up."""
    records = run.records
    if not records:
        return Markup()
    losses, held_out = numbers(records, "loss"), numbers(records, "eval_loss")
    tokens = numbers(records, "tokens")
    speed = median_speed(run)
    checkpoints = ", ".join(map(str, run.checkpoints))
    return facts(
        {
            "steps": f"{records[-1]['step']:,}",
            "tokens": f"{sum(map(int, tokens.values)):,}" if tokens.steps else None,
            "loss, last": f"{losses.values[-1]:.4f}" if losses.steps else None,
            "held-out loss, last": f"{held_out.values[-1]:.4f}" if held_out.steps else None,
            "held-out loss, least": f"{min(held_out.values):.4f}" if held_out.steps else None,
            "tokens/s, median": f"{speed:,.0f}" if speed is not None else None,
            "checkpoints": checkpoints or None,
        }
    )


def training_curves(run: Run) -> list[Markup]:
    """The curves side by side, and what they begin and end with as a table."""
    pictures, rows = [], []
    for title, label, keys in _KINDS:
        named = [numbers(run.records, key)._replace(name=name) for name, key in keys.items()]
        named = [found for found in named if found.steps]
        if not named:
            continue
        pictures.append(picture(partial(plot_curves, named, label=label), _in_words(title, named), title))
        for found in named:
            name = title if len(named) == 1 else f"{title}: {found.name}"
            least, greatest = min(found.values), max(found.values)
            rows.append((name, *(f"{value:,.4g}" for value in (found.values[0], found.values[-1], least, greatest))))
    columns = ("curve", "first", "last", "least", "greatest")
    return [side_by_side(*pictures), folded("the curves in figures", table("Curves in figures", columns, rows))]


def overlaid_losses(runs: dict[str, Run]) -> Markup:
    """The losses of several runs in one picture; nothing for fewer than two."""
    curves = [numbers(run.records, "loss")._replace(name=name) for name, run in runs.items()]
    curves = [curve for curve in curves if curve.steps]
    if len(curves) < 2:
        return Markup()
    draw = partial(plot_curves, curves, label="nats per token")
    return picture(draw, _in_words("Training loss", curves), "Training loss")


def use_of_experts(run: Run, title: str) -> list[Markup]:
    """How often the experts were chosen: over the steps, and at the end."""
    found: list[Markup] = []
    for key, whose in (("expert_load", "experts"), ("perft_load", "adapters")):
        steps, shares = shares_over_time(run.records, key)
        if not shares:
            continue
        if len(steps) > 1:
            alt = (
                f"heat maps of how often each of the {whose} was chosen, by layer, over {len(steps)} steps; "
                + _spread({layer: share[-1] for layer, share in shares.items()})
            )
            caption = f"Use of the {whose} over the steps: red is more than an even share, blue is less"
            found.append(picture(partial(plot_use_over_time, steps, shares), alt, caption, wide=True))
        last = max(1, math.ceil(_END * len(steps)))
        ends = {layer: share[-last:].mean(axis=0) for layer, share in shares.items()}
        over = "the last step" if last == 1 else f"the last {last} steps"
        draw = partial(plot_load, ends, title=f"{title}: load of the {whose}, {over}")
        caption = f"Use of the {whose} by layer, {over}"
        found.append(picture(draw, f"heat map of the use of the {whose}; {_spread(ends)}", caption, wide=True))
    return found


def recipe_text(run: Run) -> Markup:
    """The recipe as it was resolved, folded."""
    return folded("the recipe with every key", code(run.recipe, "recipe"))


def median_speed(run: Run) -> float | None:
    """Tokens per second: the median, which leaves out the step that compiles."""
    speeds = numbers(run.records, "tokens_per_second").values
    return statistics.median(speeds) if speeds else None


def numbers(records: Sequence[Record], key: str) -> Curve:
    """The finite numbers of a key over the steps; there may be none."""
    found = [(record["step"], float(record[key])) for record in records if is_number(record.get(key))]
    return Curve(key, [step for step, _ in found], [value for _, value in found])


def shares_over_time(records: Sequence[Record], key: str) -> tuple[list[int], dict[int, Float[np.ndarray, "n E"]]]:
    """Steps, and by layer the shares of the experts at each; only of steps that have all layers, in equal lengths."""
    last = next((record[key] for record in reversed(records) if isinstance(record.get(key), dict)), {})
    shape = {layer: len(shares) for layer, shares in last.items() if isinstance(shares, list) and shares}
    if not shape or not all(layer.isdecimal() for layer in shape):
        return [], {}
    fitting = [record for record in records if _fits(record.get(key), shape)]
    stacked = {int(layer): np.array([record[key][layer] for record in fitting], np.float64) for layer in shape}
    return [record["step"] for record in fitting], stacked if fitting else {}


def _fits(loads: object, shape: dict[str, int]) -> bool:
    if not isinstance(loads, dict):
        return False
    for layer, length in shape.items():
        shares = loads.get(layer)
        if not isinstance(shares, list) or len(shares) != length or not all(map(is_number, shares)):
            return False
    return True


def _in_words(title: str, curves: Sequence[Curve]) -> str:
    parts = [
        f"{curve.name} from {curve.values[0]:.4g} at step {curve.steps[0]} to {curve.values[-1]:.4g} at step "
        f"{curve.steps[-1]}"
        for curve in curves
    ]
    return f"{title} over the steps: {'; '.join(parts)}"


def _spread(shares: dict[int, np.ndarray]) -> str:
    """Returns a sentence on the experts that are used most and least, with their layers."""
    relative = {layer: share * len(share) for layer, share in shares.items()}
    most = max(relative, key=lambda layer: relative[layer].max())
    least = min(relative, key=lambda layer: relative[layer].min())
    return (
        f"most used is expert {relative[most].argmax()} of layer {most}, {relative[most].max():.2f} times an even "
        f"share; least expert {relative[least].argmin()} of layer {least}, {relative[least].min():.2f} times"
    )
