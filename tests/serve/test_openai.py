"""Requests as they are read: fields that are done, that change nothing, and that are refused by name."""

from typing import Any

import pytest

from moe_jax.serve.fields import _UNCHANGED, _UNCHANGED_HERE, CHAT, COMPLETION
from moe_jax.serve.openai import model_of, read_chat, read_completion
from moe_jax.serve.protocol_error import ProtocolError

MESSAGES = [{"role": "user", "content": "a"}]


def completion(**fields: Any):
    return read_completion({"model": "m", "prompt": "a", **fields})


def chat(**fields: Any):
    return read_chat({"model": "m", "messages": MESSAGES, **fields})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.5),
        ("repetition_penalty", True),
        ("top_k", 1),
        ("top_k", False),
        ("min_p", 0.5),
        ("min_tokens", 8),
        ("length_penalty", 0.9),
        ("use_beam_search", True),
        ("frequency_penalty", 0.1),
        ("logit_bias", {"1": 5}),
        ("n", 2),
        ("structured_outputs", {"choice": ["a"]}),
        ("guided_choice", ["a"]),
        ("response_format", {"type": "json_object"}),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("presence_penalty", float("nan")),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(name, value):
    for ask in (completion, chat):
        with pytest.raises(ProtocolError, match=f"{name}=.* not supported") as told:
            ask(**{name: value})
        assert told.value.status == 400 and told.value.param == name


@pytest.mark.parametrize(("name", "nearest"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("zzz", "")])
def test_an_unknown_field_is_refused_and_the_nearest_is_told(name, nearest):
    for ask in (completion, chat):
        with pytest.raises(ProtocolError, match=f"unknown field '{name}'") as told:
            ask(**{name: 1})
        assert told.value.param == name and (f"did you mean {nearest!r}" in told.value.message) == bool(nearest)
    with pytest.raises(ProtocolError, match="did you mean 'include_usage'"):
        chat(stream_options={"included_usage": True})


def test_fields_that_change_nothing_pass():
    """With null, and at the values that clients and other servers have by default."""
    common = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    common |= {"frequency_penalty": 0.0, "top_k": -1, "repetition_penalty": 1.0, "n": 1, "tools": None, "seed": None}
    for read, ask in ((COMPLETION, completion), (CHAT, chat)):
        unchanged = {**_UNCHANGED, **_UNCHANGED_HERE[read]}
        ask(**common, stream_options={"include_usage": True, "include_obfuscation": False})
        ask(**dict.fromkeys(unchanged))
        ask(**{name: values[-1] for name, values in unchanged.items() if values})


def test_what_a_request_has_to_have():
    for read, body, missing in (
        (model_of, {"prompt": "a"}, "model"),
        (read_completion, {"model": "m"}, "prompt"),
        (read_completion, {"model": "m", "prompt": None}, "prompt"),
        (read_chat, {"model": "m"}, "messages"),
    ):
        with pytest.raises(ProtocolError, match=f"{missing} is missing") as told:
            read(body)
        assert told.value.status == 400 and told.value.param == missing


def test_the_new_name_of_the_number_of_tokens_comes_first():
    assert chat(max_tokens=3, max_completion_tokens=5).max_tokens == 5
    assert chat(max_tokens=3).max_tokens == 3 and chat().max_tokens is None


def test_seeds_that_differ_in_32_bits_are_different():
    seeds = [completion(seed=seed).seed for seed in (0, 1 << 31, (1 << 32) - 1, 1 << 32, -1)]
    assert seeds == [0, 1 << 31, (1 << 32) - 1, 0, (1 << 32) - 1]
