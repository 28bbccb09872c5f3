"""Hugging Face config.json <-> ModelConfig, for all families."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from moe_jax.conversion.config_keys import HFConfig, is_integer, without_code_beside
from moe_jax.conversion.families import FAMILIES, Family, family_named
from moe_jax.conversion.families.rope_keys import LEAVES_A_PART, PARTIAL
from moe_jax.conversion.formats import format_of, without_format
from moe_jax.conversion.vision_formats import MODEL_TYPES, vision_format_named
from moe_jax.conversion.vision_formats.language_parts import LANGUAGE_PARTS
from moe_jax.conversion.vision_formats.vision_format import Parts
from moe_jax.core.errors import InputError, nearest, raise_if_any, shown
from moe_jax.images.processing import read_processing
from moe_jax.models import ImageProcessing, ModelConfig

# Settings of training and storage, which Hugging Face formats do not store and which do not change the logits.
_NOT_COMPARED = {
    *("family", "foreign", "dtype", "balance_coef", "z_coef", "cv_coef", "balance_over", "balance_choices"),
    *("sequence_balance_coef", "capacity_factor", "capacity_rows"),
}


def read_hf_config(
    data: Mapping[str, Any],
    *,
    ignored: Collection[str] = (),
    processing: Mapping[str, Any] | ImageProcessing | None = None,
    further: bool = False,
) -> ModelConfig:
    """Reads a config.json, parsed, in the style of Transformers 4 or 5. Keys that are not used are kept in `foreign`.

    Args:
      data: its keys.
      ignored: keys that are assumed to change nothing; those of an object in it as `object.key`.
      processing: of a model that sees, the keys of the preprocessor_config.json beside it, or what they say; None:
        there is none, and pictures are processed as is usual for the tower.
      further: whether layers that predict tokens after the next belong to the model; they are otherwise left out.

    Raises:
      InputError: unknown family, or format of quantised numbers; missing, ill-typed or contradicting values; or unknown
        keys, which may change what the model computes, unless they are `ignored`.
    """
    format_of(data)  # one that is unknown is found before anything else is asked
    data = without_format(data)
    name = _family_name(data)
    if further and (name not in FAMILIES or FAMILIES[name].further_form is None):
        raise InputError(f"--further keep: of {name!r} models no layers are known that predict tokens after the next")
    if name in LANGUAGE_PARTS:
        whole = LANGUAGE_PARTS[name]
        return _read_inside(whole.where, whole.keys(data), ignored)
    known = [*ignored, *(MODEL_TYPES[name].harmless if name in MODEL_TYPES else ())]
    parts = Parts(lambda key: _read_part(data, key, known), lambda *given: _processing(processing, *given))
    if name in MODEL_TYPES:
        format_ = MODEL_TYPES[name]
        keys = HFConfig(data, format_.defaults)
        config = format_.read(keys, parts)
        keys.check_all_known(format_.harmless, ignored)
        return config
    for family in FAMILIES.values():
        if family.within is not None and family.within[0] == name:
            return _read_part(data, family.within[1], ignored, model_type=family.name)
    family = FAMILIES[name]
    if family.sees is not None:
        data = vision_format_named(family.sees).completed(data)
    keys = HFConfig(data, family.defaults, family.names)
    try:
        config = family.read(keys)
    except InputError as error:
        raise keys.said_of_keys(error) from None
    if family.sees is not None:
        config = vision_format_named(family.sees).read(keys, parts._replace(text=config))
    if config.moe_layers:
        config = dataclasses.replace(config, balance_over=family.balance_over)
    if family.classifier_architecture in _architectures(data):
        config = _as_classifier(config, family, data)
    keys.check_all_known(family.harmless, ignored)
    return dataclasses.replace(config, further_layers=family.count_further(data)) if further else config


def _read_part(
    data: Mapping[str, Any], key: str, ignored: Collection[str], *, model_type: str | None = None
) -> ModelConfig:
    """Reads the config of a model that is a part of another one's, under a key of its config.json."""
    part = data.get(key)
    if not isinstance(part, Mapping):
        raise InputError(f"config.json: {key!r} is {shown(part)}, expected the config of a model")
    part = part if model_type is None else {**part, "model_type": model_type}
    return _read_inside(key, part, ignored)


def _read_inside(where: str, part: Mapping[str, Any], ignored: Collection[str]) -> ModelConfig:
    """Reads the config of a part, which stands there in the config of the whole."""
    within = f"{where}."
    try:
        return read_hf_config(part, ignored=[one.removeprefix(within) for one in ignored if one.startswith(within)])
    except InputError as error:
        # The option to ignore a key names it with the object that it is in.
        said, option, named = str(error).partition("--ignore-keys ")
        named = named.replace(",", f",{within}")
        raise InputError(f"{where}: {said}{option}{within if option else ''}{named}") from None


def _processing(
    given: Mapping[str, Any] | ImageProcessing | None,
    tower: ModelConfig,
    changed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> ImageProcessing:
    if isinstance(given, ImageProcessing):
        return given
    if given is not None:
        return read_processing(changed(given))
    return usual_processing(tower)


def usual_processing(tower: ModelConfig) -> ImageProcessing:
    """Returns how pictures are processed for an image encoder, where no file says it."""
    usual, patches = family_named(tower.family).processing, tower.patches
    assert usual is not None and patches is not None, "an image encoder says how pictures are processed"
    size = tower.foreign.get("image_size")
    return usual(size if is_integer(size) else patches.grid[0] * patches.size)


def write_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of `config` in the format of its family.

    Keys of `foreign` are in it, but for those that ask for code beside the file if Transformers has a class for the
    family. The result is read back and compared, so that a format that cannot express something is an error and never
    a silent loss. (Coefficients of auxiliary losses and the expert capacity in training may be lost; that of the
    balance loss becomes the one for what the published code takes the loss of, see `with_balance_over`.)

    Raises:
      InputError: if the format cannot express the model.
    """
    written = _write(config)
    lost = differences(config, _read_back(config, written))
    raise_if_any(lost, f"the format of {config.family!r} cannot hold this model")
    keys = _with_foreign(config, written)
    return keys if family_named(config.family).own_code else without_code_beside(keys)


def _with_foreign(config: ModelConfig, written: dict[str, Any]) -> dict[str, Any]:
    if config.vision is None:
        return _merged(written, config.foreign)
    format_ = vision_format_named(config.vision.family)
    if format_.text_key is None:
        written = _merged(written, config.foreign)
    for key, foreign in ((format_.text_key, config.foreign), (format_.tower_key, config.vision.tower.foreign)):
        if key is not None and isinstance(written.get(key), dict):
            written[key] = _merged(written[key], foreign)
    return _merged(written, config.vision.foreign)


def _read_back(config: ModelConfig, written: Mapping[str, Any]) -> ModelConfig:
    processing = None if config.vision is None else config.vision.processing
    return read_hf_config(written, processing=processing, further=config.further_layers > 0)


def kept_keys(config: ModelConfig) -> set[str]:
    """Returns the keys that a config writes back without knowing them, to be ignored by `read_hf_config`."""
    inner = {f"{key}.{one}" for key, value in config.foreign.items() if isinstance(value, Mapping) for one in value}
    own = {*config.foreign, *inner}
    if config.vision is None:
        return own
    format_ = vision_format_named(config.vision.family)
    tower = {f"{format_.tower_key}.{key}" for key in kept_keys(config.vision.tower)}
    return {*own, *(f"{format_.text_key}.{key}" for key in own), *tower, *config.vision.foreign}


def inexpressible(config: ModelConfig) -> list[str]:
    """Returns a sentence for each thing that the family's format cannot express; none if `write_hf_config` succeeds."""
    try:
        return differences(config, _read_back(config, _write(config)))
    except InputError as error:
        return [str(error)]


def with_balance_over(config: ModelConfig, over: Literal["layer", "model"]) -> ModelConfig:
    """Returns a config whose balance loss is taken of every layer, or of the whole model, with the coefficients for it.

    Of L layers with the coefficient c, the sum of losses `c E sum_i f_i P_i` is the model's one loss
    `(c L / k) E k sum_i F_i P_i` if all layers have the same loads and probabilities, as balanced ones have, and always
    if L is 1. Otherwise no coefficient makes them equal, for F and P are means over layers; the gradient of a layer's
    probabilities then has the mean F in place of its own f.
    """
    layers, count = list(config.layers), len(config.moe_layers)
    for i in config.moe_layers if config.balance_over != over else ():
        moe = config.moe(i)
        factor = count / moe.balanced_choices if over == "model" else moe.balanced_choices / count
        coefficient = float(f"{moe.balance_coef * factor:.12g}")  # without the last digit's rounding
        layers[i] = dataclasses.replace(layers[i], mlp=dataclasses.replace(moe, balance_coef=coefficient))
    return dataclasses.replace(config, layers=tuple(layers), balance_over=over)


def _write(config: ModelConfig) -> dict[str, Any]:
    if config.vision is not None:
        text, tower = (_write(one) for one in (dataclasses.replace(config, vision=None), config.vision.tower))
        format_ = vision_format_named(config.vision.family)
        keys = format_.write(config, config.vision, text, tower)  # perhaps with the name of the language model's family
        return {"architectures": [format_.architecture], "model_type": format_.name, **keys}
    family = family_named(config.family)
    alone = [i for i, layer in enumerate(config.layers) if len(layer.branches) == 1]
    if alone and not family.one_branch:
        branch = "attention" if "attention" in config.layers[alone[0]].branches else "an FFN or MoE"
        raise InputError(f"layer {alone[0]} has {branch} alone, which the format of {family.name!r} cannot hold")
    if config.recurrent_layers and not family.recurrent:
        at = config.recurrent_layers[0]
        raise InputError(
            f"layer {at} has a {config.layers[at].attention.describe()} in the place of attention, which the format of "
            f"{family.name!r} cannot hold"
        )
    config = with_balance_over(config, family.balance_over)
    written = {"architectures": [family.architecture], "model_type": family.name, **family.write(config)}
    if PARTIAL in written and config.rope.scaling != LEAVES_A_PART and not family.rotates_parts:
        # Transformers would not ask for the key.
        share = config.rope.fraction
        raise InputError(f"in the format of {family.name!r} whole heads are rotated, not {share} of each")
    if config.further_layers and family.further_form is not None:
        written[family.further[0]] = config.further_layers
    if config.num_classes is None or family.classifier_architecture is None:
        return written
    # It would say whether a head for tokens, which the model lacks, is the embedding; T5's encoder uses it, too.
    written.pop("tie_word_embeddings", None)
    names = class_names(config) or tuple(f"LABEL_{i}" for i in range(config.num_classes))
    return written | {
        "architectures": [family.classifier_architecture],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def class_names(config: ModelConfig) -> tuple[str, ...] | None:
    """Returns the names of the classes that a model scores, from its source; None: there are none."""
    named = config.foreign.get("id2label")
    if not isinstance(named, Mapping) or config.num_classes is None:
        return None
    names = tuple(named.get(str(i)) for i in range(config.num_classes))
    return tuple(map(str, names)) if None not in names and len(names) == len(named) else None


def _as_classifier(config: ModelConfig, family: Family, data: Mapping[str, Any]) -> ModelConfig:
    """Converts the config of a model that scores tokens to one of a model that scores classes."""
    assert family.classifier is not None
    named, count = data.get("id2label"), data.get("num_labels")
    if named is not None:
        if not isinstance(named, Mapping) or set(named) != {str(i) for i in range(len(named))} or not named:
            raise InputError(f"config.json: 'id2label' is {shown(named)}, expected a name for each of 0, 1, ...")
        count = len(named)
    count = 2 if count is None else count  # as in Transformers
    if not is_integer(count) or count < 1:
        raise InputError(f"config.json: 'num_labels' is {shown(count)}, expected a number from 1 on")
    tied = {key: data[key] for key in ("tie_word_embeddings",) if key in data}
    return dataclasses.replace(
        config,
        num_classes=count,
        tie_embeddings=False,
        logit_scale=1.0,
        logit_soft_cap=None,
        foreign={**config.foreign, **tied},
        **{"head_bias": False, **family.classifier.fields},
    )


def _architectures(data: Mapping[str, Any]) -> list[str]:
    given = data.get("architectures")
    return [one for one in given if isinstance(one, str)] if isinstance(given, list) else []


def _family_name(data: Mapping[str, Any]) -> str:
    name = data.get("model_type")
    if name is None:
        # Of two that name one class, the family that Transformers has it for comes last.
        in_order = sorted(FAMILIES.values(), key=lambda family: not family.own_code)
        by_architecture = {one.architecture: one.name for one in (*in_order, *MODEL_TYPES.values())}
        known = {family.classifier_architecture: family.name for family in FAMILIES.values()} | by_architecture
        name = next((known[one] for one in _architectures(data) if one in known), None)
        if name is None:
            given = data.get("architectures") or []
            raise InputError(
                f"config.json has no model_type and architectures {shown(given)}, of which none is known"
                f"{_nearest_to(given, known)}; add its model_type, one of {len(FAMILIES)} in the documentation"
            )
    within = [family.within[0] for family in FAMILIES.values() if family.within is not None]
    if not isinstance(name, str) or name not in {*FAMILIES, *MODEL_TYPES, *LANGUAGE_PARTS, *within}:
        if isinstance(data.get("text_config"), Mapping):
            raise InputError(
                f"config.json: {shown(name)} is a model of text and more (it has a text_config); save its language "
                "model alone, with a config.json of its own, and convert that"
            )
        raise InputError(
            f"config.json: unknown model_type {shown(name)}{_nearest_to([name], FAMILIES)}; the documentation has "
            f"the {len(FAMILIES)} families that are known"
        )
    return name


def _nearest_to(given: Any, known: Iterable[str | None]) -> str:
    """Returns a hint at the known name that is like the first of those given, if that is a string."""
    first = given[0] if isinstance(given, list) and given else None
    return nearest(first, [one for one in known if one is not None]) if isinstance(first, str) else ""


def _merged(written: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Adds kept keys to the written ones, also inside objects; written keys take precedence."""
    result = dict(written)
    for key, value in kept.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = _merged(result[key], value)
        else:
            result.setdefault(key, value)
    return result


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Returns what a config lost by being written, a sentence per field; layers with equal losses share a sentence."""
    found = _fields_that_differ("", ours, theirs)
    by_loss: dict[str, list[int]] = {}
    if ours.num_layers == theirs.num_layers:
        for i, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
            for loss in _fields_that_differ("", a, b):
                by_loss.setdefault(loss, []).append(i)
    for loss, indices in by_loss.items():
        where = f"layer {indices[0]}" if len(indices) == 1 else f"{len(indices)} layers (first: {indices[0]})"
        found.append(f"{where}: {loss}")
    return found


def _fields_that_differ(prefix: str, ours: Any, theirs: Any) -> list[str]:
    if type(ours) is not type(theirs):
        # Parts that come in kinds are named by their kind, as in config.json.
        names = (getattr(part, "kind", type(part).__name__) for part in (ours, theirs))
        return ["{} is {!r}, the format can only say {!r}".format(prefix.removesuffix("."), *names)]
    found = []
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if a == b or field.name in _NOT_COMPARED or field.name == "layers":
            continue
        if dataclasses.is_dataclass(a):
            found += _fields_that_differ(f"{prefix}{field.name}.", a, b)
        else:
            found.append(f"{prefix}{field.name} is {shown(a)}, the format can only say {shown(b)}")
    return found
