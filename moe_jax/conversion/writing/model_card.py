"""The model card of an exported model: a README.md, made of its config and its lineage."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import moe_jax
from moe_jax.core.errors import clipped, printable
from moe_jax.core.formatting import count_parameters
from moe_jax.core.verb_spec import NOT_GIVEN
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_names import NAME
from moe_jax.models import ModelConfig
from moe_jax.nn.projector import vision_in_words

_DATA = ("data.sources", "eval.text", "calibrate", "text", "router_from")
_MOST_OPTIONS = 60
_OF_ONE_RUN = re.compile(r"seconds?$|^peak_memory|^bytes$")


def model_card(config: ModelConfig, lineage: Sequence[Mapping[str, Any]], *, library: str) -> bytes:
    """Returns the card of a model: its base and licence, the commands that made it, their data and figures.

    Two models that were made alike have the same card, whatever their directories are called and how long it took.

    Args:
      config: of the model as it is written.
      lineage: without places (`without_places`); what it does not say is not in the card.
      library: that loads the model, as the Hugging Face Hub calls it.
    """
    base = next((source for entry in lineage for source in entry.get("sources", ())), {})
    hub, licence = str(base.get("hub", "")).partition("@")[0], str(base.get("license"))
    licence = licence if "license" in base and re.fullmatch(r"[\w.+-]{1,60}", licence) else None
    head = {
        "library_name": library,
        "pipeline_tag": _task(config),
        "base_model": hub if NAME.fullmatch(hub) else None,
        "license": licence,
        "tags": "[moe_jax]",
    }
    known = [f"{key}: {value}" for key, value in head.items() if value is not None]
    of_base = f"`{_plain(hub or base.get('path', 'not recorded'))}`"
    holds = (
        f"its licence is `{licence}`" if licence else "its licence is not recorded here; it holds for this model too"
    )
    lines = [
        *("---", *known, "---", "", f"# {_title(hub or str(base.get('path', config.family)), lineage)}", ""),
        *(_about(config), ""),
        *("## Base", "", f"{of_base}; {holds}.", "", "## How it was made", ""),
        *(_step(number, entry) for number, entry in enumerate(lineage, 1)),
    ]
    if data := dict.fromkeys(_data(lineage)):
        lines += ["", "## Data", "", *(f"- {one}" for one in data)]
    lines += [
        "",
        f"`lineage.json` has all options, versions, dates and figures. Written by moe_jax {moe_jax.__version__}.",
        "",
    ]
    return "\n".join(lines).encode()


def _title(base: str, lineage: Sequence[Mapping[str, Any]]) -> str:
    """Returns the name of the base, and the commands by which more than its format was changed."""
    made = [entry["command"] for entry in lineage if entry["command"] not in ("convert", "export")]
    return _plain(f"{base.rpartition('/')[2]}: {', '.join(made)}" if made else base.rpartition("/")[2])


def _task(config: ModelConfig) -> str:
    if config.vision is not None:
        return "image-text-to-text"
    return "text2text-generation" if config.has_encoder else "text-generation"


def _about(config: ModelConfig) -> str:
    sees = vision_in_words(config)
    return _about_language(config) + ("" if sees is None else f" It sees ({sees}).")


def _about_language(config: ModelConfig) -> str:
    about = f"A {config.family} model of {count_parameters(leaf_specs(config).values()):,} parameters"
    if not config.moe_layers:
        return f"{about} in {config.num_layers} layers."
    moe = config.moe(config.moe_layers[0])
    experts = f"{moe.num_experts} experts, of which a token uses {moe.top_k}"
    return f"{about}; {len(config.moe_layers)} of its {config.num_layers} layers have {experts}."


def _step(number: int, entry: Mapping[str, Any]) -> str:
    given = {name: value for name, value in entry.get("options", {}).items() if value not in (*NOT_GIVEN, [], {}, "")}
    options = " ".join(f"{name}={_value(value)}" for name, value in list(given.items())[:_MOST_OPTIONS])
    sources = " and ".join(f"`{_plain(one['path'])}` ({one['fingerprint'][:12]})" for one in entry.get("sources", ()))
    measured = {name: one for name, one in entry.get("measured", {}).items() if isinstance(one, int | float)}
    figures = {name: one for name, one in measured.items() if not _OF_ONE_RUN.search(name)}
    said = ", ".join(f"{_plain(name.replace('_', ' '))} {value:,}" for name, value in figures.items())
    return (
        f"{number}. **{_plain(entry['command'])}**"
        + (f" of {sources}" if sources else "")
        + (f": `{_plain(options, most=4000)}`" if options else "")
        + (f". Figures: {said}." if said else "")
    )


def _data(lineage: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for entry in lineage:
        for option in _DATA:
            found = entry.get("options", {}).get(option)
            for one in found if isinstance(found, list) else [found] if found else []:
                place = one.get("path") if isinstance(one, Mapping) else one
                yield f"`{_plain(place)}` ({_plain(entry['command'])}, `{option}`)"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _plain(value: Any, most: int | None = None) -> str:
    """Returns a text that stays one line, and plain, in Markdown."""
    text = re.sub(r"[`<>\[\]]", "", printable(str(value)).replace("\n", " "))
    return clipped(text) if most is None else text[:most]
