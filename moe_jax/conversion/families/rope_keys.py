"""Rotary embeddings in a Hugging Face config.json, in both of its styles.

Transformers 4 writes `rope_theta` and `rope_scaling: {"type" or "rope_type": ..., ...}`, Transformers 5 writes
`rope_parameters: {"rope_type": ..., "rope_theta": ..., ...}`. We write the older style: every release that reads a
family reads it. Beside it we write the newer one, where a type of layer has something that only this one can say.
"""

from collections.abc import Callable
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.core.errors import InputError, is_finite, nearest, shown
from moe_jax.models import RopeConfig

# Hugging Face's name -> our name. LongRoPE was called `su` in the first Phi-3 checkpoints.
SCALINGS = {
    "default": "none",
    **{name: name for name in ("linear", "dynamic", "yarn", "longrope")},
    "su": "longrope",
    "llama3": "llama3",
    "proportional": "proportional",
}
# The keys that a scaling may have, and those that it must have. `RopeConfig` has a shorter name for one.
_ORIGINAL = "original_max_position_embeddings"
_KEYS = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor",),
}  # fmt: skip
_REQUIRED = {
    **dict.fromkeys(("linear", "dynamic"), ("factor",)),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_FIELDS = {key: key for keys in _KEYS.values() for key in keys} | {_ORIGINAL: "original_max_positions"}
_LISTS = ("short_factor", "long_factor")
_WITH_ORIGINAL_LENGTH = ("yarn", "longrope", "llama3")
# The share of each head that is rotated. Only a family that has a default for it has code that takes a part of a head;
# the code of all others rotates whole heads, of which a rotation of this one type leaves a part at rest.
PARTIAL, LEAVES_A_PART = "partial_rotary_factor", "proportional"


def read_rope(config: HFConfig, *, max_positions: int, head_dim: int) -> RopeConfig:
    """Reads the rotary embedding of a config, which has a default for `rope_theta`, in either style.

    A scaling without an original length or factor refers to `max_positions`; with `head_dim`, the width of a head, the
    lengths of LongRoPE's factors are compared.

    Raises:
      InputError: unknown type, missing or contradicting values; or a part of each head would be rotated in a family
        that rotates whole heads.
    """
    values = _one_dict(config)
    theta = values.pop("rope_theta", None)
    top_theta = config.number("rope_theta")
    if theta is None:
        theta = top_theta
    elif config.given("rope_theta") and theta != top_theta:
        raise InputError(
            f"config.json: rope_theta is {top_theta}, but its rope parameters say {shown(theta)}; keep one"
        )
    fraction, top_fraction = values.pop(PARTIAL, None), config.number(PARTIAL)
    if fraction is None:
        fraction = top_fraction
    elif config.given(PARTIAL) and fraction != top_fraction:
        raise InputError(
            f"config.json: {PARTIAL} is {top_fraction}, but its rope parameters say {shown(fraction)}; keep one"
        )
    fraction = 1.0 if fraction is None else _checked(PARTIAL, fraction)

    scaling = _scaling(values)
    if fraction != 1.0 and scaling != LEAVES_A_PART and not config.has_default(PARTIAL):
        raise InputError(
            f"config.json: {PARTIAL} is {fraction}, but the code of this family rotates whole heads, whatever it says; "
            "remove the key if so does the model"
        )
    fields: dict[str, Any] = {}
    for key in _KEYS[scaling]:
        value = values.pop(key, None)
        if value is None and key in _REQUIRED.get(scaling, ()):
            raise InputError(f"config.json: rope type {scaling!r} needs {key!r}")
        if value is not None:
            fields[_FIELDS[key]] = _checked(key, value)
    if values:
        config.keep("rope_scaling", values)
        # Keys of other types have no effect here; `finetuned` is a note in early YaRN checkpoints.
        config.unknown_inside("rope_scaling", [key for key in values if key not in _FIELDS and key != "finetuned"])

    if scaling in _WITH_ORIGINAL_LENGTH:
        # Phi-3 style configs hold the original length beside the rope parameters, and it takes precedence.
        top = config.integer(_ORIGINAL)
        original = fields.get("original_max_positions", max_positions)
        original = original if top is None else _checked(_ORIGINAL, top)
        fields["original_max_positions"] = original
        fields.setdefault("factor", max_positions / original)
    rotated_pairs = int(head_dim * fraction) // 2
    for key in _LISTS:
        if key in fields and len(fields[key]) != rotated_pairs:
            raise InputError(
                f"config.json: rope {key} has {len(fields[key])} entries, "
                f"expected {rotated_pairs}, one per rotated pair"
            )
    if scaling == "llama3" and fields["high_freq_factor"] < fields["low_freq_factor"]:
        raise InputError(
            f"config.json: rope high_freq_factor={fields['high_freq_factor']} is below "
            f"low_freq_factor={fields['low_freq_factor']}"
        )
    return RopeConfig(theta=_checked("rope_theta", theta), fraction=fraction, scaling=scaling, **fields)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Returns the keys of config.json for `rope`, in the style of Transformers 4."""
    keys: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.fraction != 1.0:
        keys[PARTIAL] = rope.fraction
    if rope.scaling != "none":
        # Releases before 4.43 know `type` only and refuse any third key beside it.
        name = "type" if rope.scaling in ("linear", "dynamic") else "rope_type"
        scaling: dict[str, Any] = {name: rope.scaling}
        for key in _KEYS[rope.scaling]:
            value = getattr(rope, _FIELDS[key])
            if value is not None:
                scaling[key] = list(value) if isinstance(value, tuple) else value
        keys["rope_scaling"] = scaling
        if rope.scaling == "longrope":
            # Transformers 4 takes LongRoPE's original length only from here.
            keys[_ORIGINAL] = rope.original_max_positions
    return keys


def write_rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """Returns the one object for `rope` in the style of Transformers 5, in which types of layers may have one each."""
    keys = write_rope(rope)
    scaling = keys.pop("rope_scaling") or {}
    name = scaling.pop("type", None) or scaling.pop("rope_type", "default")
    return {"rope_type": name, **scaling, **keys}


def _one_dict(config: HFConfig) -> dict[str, Any]:
    """Returns the rope parameters as one flat dict, from wherever the config holds them."""
    scaling = config.mapping("rope_scaling") or {}
    parameters = config.mapping("rope_parameters") or {}
    if parameters and all(value is None or isinstance(value, dict) for value in parameters.values()):
        variants = [value for value in parameters.values() if value is not None]
        if any(variant != variants[0] for variant in variants):
            raise InputError("config.json: rope_parameters differ between layer types, which is not supported")
        parameters = variants[0] if variants else {}
    for key in scaling.keys() & parameters.keys():
        if scaling[key] != parameters[key]:
            raise InputError(
                f"config.json: rope_scaling says {shown(key)[1:-1]}={shown(scaling[key])}, rope_parameters say "
                f"{shown(parameters[key])}; keep one of the two"
            )
    return {**parameters, **scaling}


def _scaling(values: dict[str, Any]) -> Any:
    given = {key: values.pop(key, None) for key in ("rope_type", "type")}
    named = {key: name for key, name in given.items() if name is not None} or {"rope_type": "default"}
    for key, name in named.items():
        if not isinstance(name, str) or name not in SCALINGS:
            hint = nearest(name, SCALINGS) if isinstance(name, str) else ""
            known = ", ".join(SCALINGS)
            raise InputError(f"config.json: unknown rope type {shown(name)}{hint} as {key!r}; known: {known}")
    names = list(named.values())
    if len(set(names)) > 1:
        raise InputError(f"config.json: rope parameters name two types, {' and '.join(sorted(names))}; keep one")
    return SCALINGS[names[0]]


def _is_positive(value: Any) -> bool:
    return is_finite(value) and value > 0


# The requirement on a value, in words and as a test, and its conversion to the type in `RopeConfig`.
_POSITIVE = ("a number above 0", _is_positive, float)
_NUMBERS = (
    "a list of numbers above 0",
    lambda value: isinstance(value, list) and all(map(_is_positive, value)),
    lambda value: tuple(map(float, value)),
)
_KINDS: dict[str, tuple[str, Callable[[Any], bool], Callable[[Any], Any]]] = {
    "truncate": ("true or false", lambda value: isinstance(value, bool), bool),
    PARTIAL: ("a number", is_finite, float),
    # 0 is how a config says that there is no such magnitude.
    **dict.fromkeys(
        ("mscale", "mscale_all_dim"), ("a number from 0 on", lambda value: is_finite(value) and value >= 0, float)
    ),
    # Some configs write it as 8192.0.
    _ORIGINAL: ("a number of positions", lambda value: _is_positive(value) and value == int(value), int),
    **dict.fromkeys(_LISTS, _NUMBERS),
}


def _checked(key: str, value: Any) -> Any:
    """Returns the value of a key in the type that `RopeConfig` has for it."""
    expected, fits, convert = _KINDS.get(key, _POSITIVE)
    if not fits(value):
        raise InputError(f"config.json: rope {key} is {shown(value)}, expected {expected}")
    return convert(value)
