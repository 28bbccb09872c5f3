"""Layers in words, for the summaries of modules: of each its attention and its FFN or MoE, equal ones once."""

from collections.abc import Iterable
from typing import Any

from flax import nnx

from moe_jax.core.formatting import index_set
from moe_jax.experts.forms.kernel_of_codes import CodedLevels
from moe_jax.experts.linear import Linear

MOST_KINDS = 10


def layer_words(block: Any) -> str:
    """Returns a layer in words, of a user's own with the name of its class before them."""
    parts = {name: getattr(block, name, None) for name in ("attention", "cross_attention", "mlp")}
    words = {name: _words(part) for name, part in parts.items() if part is not None}
    if "cross_attention" in words:
        words["cross_attention"] = f"cross-{words['cross_attention'].removesuffix(', bidirectional')}"
    if coded := _codes_in_words(block):
        words["codes"] = f"linear maps {coded}"
    name, own = type(block).__name__, not type(block).__module__.startswith("moe_jax.")
    return ": ".join(filter(None, (name if own or not words else "", "; ".join(words.values()))))


def layer_lines(segments: Iterable[Any]) -> list[str]:
    """Returns a line for each kind of layer of some segments: `layers {0..28..2}: attention of 9 heads of 64; ...`."""
    kinds: dict[str, list[int]] = {}
    for segment in segments:
        for position, block in enumerate(segment.blocks):
            layers = [segment.layer(repeat, position) for repeat in range(segment.repeats)]
            kinds.setdefault(layer_words(block), []).extend(layers)
    lines = [f"layer{'s' * (len(layers) > 1)} {index_set(layers)}: {words}" for words, layers in kinds.items()]
    more = len(lines) - MOST_KINDS
    return lines if more <= 0 else [*lines[:MOST_KINDS], f"layers of {more} more kinds"]


def _codes_in_words(block: Any) -> str:
    """Returns the codes of linear maps outside the bank of experts; empty if there are none."""
    modules = nnx.iter_modules(block) if isinstance(block, nnx.Module) else ()
    outside = (module for path, module in modules if "experts" not in path and isinstance(module, Linear))
    forms = (form for one in outside for form in one.every_form)
    return " and ".join(sorted({form.codes.describe() for form in forms if isinstance(form, CodedLevels)}))


def _words(part: Any) -> str:
    """Returns a part of a layer in words; one of another library, or of a user, with the name of its class."""
    describe = getattr(getattr(part, "config", None), "describe", None)
    if describe is None:
        return type(part).__name__
    return describe() if type(part).__module__.startswith("moe_jax.") else f"{type(part).__name__}: {describe()}"
