"""Classes of inputs whose readers lack one bound each."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_jax.core import template_sandbox
from moe_jax.data import chat_template, tokenizer
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.data.tokens import tokenizer_bounds
from moe_jax.files import tokenizer_size
from moe_jax.serve import openai
from tests.attack.attacks import Attack, all_attacks
from tests.attack.classes import requests

ENDLESS = 1 << 40


@dataclasses.dataclass(frozen=True)
class Fault:
    """A bound that is taken out, in the process that calls `plant`, and the class of inputs that is to notice it."""

    of: str
    plant: Callable[[], None]


def _sets(module: Any, **values: Any) -> Callable[[], None]:
    def plant() -> None:
        for name, value in values.items():
            setattr(module, name, value)

    return plant


def _has(module: Any, *names: str) -> None:
    """Checks that what a fault sets is still called so."""
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing, f"{module.__name__} has no {missing}"


def _template_memory() -> None:
    """Templates have a gigabyte."""
    before = "MAX_MEMORY = 1 << 28"
    text = template_sandbox._PROGRAM.read_text()
    assert before in text
    program = Path("template_process.py").resolve()
    program.write_text(text.replace(before, "MAX_MEMORY = 1 << 30"))
    template_sandbox._PROGRAM = program


def _nothing(*given: Any, **named: Any) -> None:
    return None


TEMPLATES, TOKENIZERS, REQUESTS = "chat templates", "tokenizers that multiply", "requests"
_SET: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "templates have four seconds": (TEMPLATES, template_sandbox, {"MAX_SECONDS": 4.0}),
    "what a template writes is not counted": (TEMPLATES, template_sandbox, {"MAX_CHARS": ENDLESS}),
    "a tokenizer.json is not measured": (TOKENIZERS, tokenizer, {"check_size": _nothing}),
    "its parts have any size": (TOKENIZERS, tokenizer_size, {"MOST_PARTS": ENDLESS}),
    "its model has any settings": (TOKENIZERS, tokenizer_size, {"_MOST_SETTINGS": ENDLESS}),
    "maps of characters are not looked into": (TOKENIZERS, tokenizer_size, {"_check_charsmaps": _nothing}),
    "its tokens have any length": (TOKENIZERS, tokenizer_size, {"MOST_TOKEN": ENDLESS, "MOST_LONG": ENDLESS}),
    "growth is not looked at": (TOKENIZERS, tokenizer, {"check_growth": _nothing}),
    "growth has no bound": (TOKENIZERS, tokenizer_bounds, {"MOST_GROWTH": ENDLESS}),
    "growth of one part counts": (TOKENIZERS, tokenizer_bounds, {"math": type("", (), {"prod": max})}),
    "members of a sequence are not looked at": (
        TOKENIZERS, tokenizer_bounds, {"_flat": lambda state, members: [state]}
    ),
    "expressions take any time": (TOKENIZERS, tokenizer_bounds, {"_check_time": _nothing}),
    "words of any length are divided": (TOKENIZERS, tokenizer_bounds, {"MOST_WORD": ENDLESS}),
    "texts are not measured in characters": (REQUESTS, Tokenizer, {"most_characters": _nothing}),
    "prompts have any number of ids": (REQUESTS, requests, {"CONTEXT": ENDLESS}),
    "conversations have any number of values": (REQUESTS, chat_template, {"MAX_VALUES": ENDLESS}),
    "fields are shown whole": (REQUESTS, openai, {"shown": repr}),
}  # fmt: skip
for _module, _values in ((module, values) for _, module, values in _SET.values()):
    _has(_module, *_values)
FAULTS = {name: Fault(of, _sets(module, **values)) for name, (of, module, values) in _SET.items()}
FAULTS["templates have a gigabyte"] = Fault(TEMPLATES, _template_memory)


def _original(fault: Fault, original: Callable[[], Any]) -> Any:
    fault.plant()
    return original()


def _attack(name: str, fault: Fault) -> Attack:
    attack = all_attacks()[fault.of]
    return dataclasses.replace(attack, name=name, original=functools.partial(_original, fault, attack.original))


ATTACKS = tuple(_attack(name, fault) for name, fault in FAULTS.items())
