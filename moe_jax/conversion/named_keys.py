"""Says which keys of a config.json a problem of the model's own config comes from.

Configs of models check themselves and know their own fields alone, `top_k=9 is above num_experts=8`. Who reads a
config.json has its keys in view, `num_experts_per_tok`. Both are joined by their values, and by words of their names.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moe_jax.core.errors import InputError, is_finite, shown

# Words of usual keys, for fields whose names have none of them.
_WORDS = {
    "top_k": "experts per tok topk k",
    "dim": "intermediate ff",
    "universal_dim": "shared expert intermediate",
    "d_model": "hidden d model",
    "channels": "hidden",
    "max_positions": "max position embeddings seq length",
    "original_max_positions": "original max position embeddings",
    "num_heads": "attention value heads",
    "num_kv_heads": "key value heads",
    "rope_dim": "qk rope head dim",
    "value_dim": "v value head dim",
    "head_dim": "head dim kv",
    "groups": "group",
    "top_groups": "topk group",
    "num_groups": "groups",
    "gate_scale": "routed route scaling scale factor",
    "fraction": "partial rotary factor pct",
    "conv_width": "conv kernel cache",
    "sequence_balance_coef": "aux loss alpha coef",
    "balance_coef": "router aux loss coef",
}
_IN_MANY = {"", "num", "n", "size"}
# A number that stands behind the name of a field, or before a word: `top_k=9`, `8 experts`. Not the parts of 1,000.
_NUMBER = re.compile(
    r"(?:([a-z][a-z_.]*)(?:=|: token ))?(?<![\w,.])(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.]*\d|,\d)(?: ([a-z]+))?"
)


class _Found(NamedTuple):
    key: str
    value: Any


def with_keys(error: InputError, read: Mapping[str, Any], given: Mapping[str, Any]) -> InputError:
    """Returns an error that also names keys of config.json, and their values.

    One that names some is returned as it is.

    Args:
      error: perhaps of a config of a model.
      read: the values of all keys that were read, in this order.
      given: the keys of the file; others that were read have their default.
    """
    said = str(error)
    if "config.json" in said and any(key in said for key in read):
        return error
    found = {one.key: one.value for one in _keys_of(said, {**read, **_inside(read)})}
    found = {key: value for key, value in found.items() if f"{key}={value}" not in said}
    keys = ", ".join(f"{key!r} is {shown(value)}{_by_default(key, given)}" for key, value in found.items())
    where = "" if "config.json" in said else "config.json: "
    return InputError(f"{where}{said} ({keys})" if keys else f"{where}{said}")


def _by_default(key: str, given: Mapping[str, Any]) -> str:
    return "" if key.partition(".")[0] in given else " by default"


def _inside(read: Mapping[str, Any]) -> dict[str, Any]:
    objects = {key: value for key, value in read.items() if isinstance(value, Mapping)}
    return {f"{key}.{one}": value for key, inner in objects.items() for one, value in inner.items()}


def _keys_of(said: str, read: Mapping[str, Any]) -> Iterator[_Found]:
    """Yields, for numbers of a message, the key with this value that is most like what the message calls it.

    Of two alike it is the one that was read last, for a config is made as soon as its keys are read.
    """
    for field, number, noun in _NUMBER.findall(said):
        wanted = int(number) if number.lstrip("-").isdigit() else float(number)
        same = [_Found(key, value) for key, value in read.items() if is_finite(value) and value == wanted]
        name = field.rpartition(".")[2] or noun
        words = {*name.split("_"), *_WORDS.get(name, "").split()} - _IN_MANY
        alike = [len(words & {*re.split(r"[_.]", one.key.lower())}) + 9 * (one.key == name) for one in same]
        if any(alike):
            yield max(zip(alike, range(len(same)), same, strict=True))[2]
        elif field and len(same) == 1:
            yield same[0]
