"""Fields that a request may have: those that are read, and the values of the others by which the answer stays as it is.

Clients send many fields at their defaults, and fields of other servers. What would change the answer is refused by its
name rather than ignored, and so is what is unknown, which may be misspelt.
"""

from collections.abc import Collection, Mapping
from typing import Any

from moe_jax.core.errors import nearest, shown
from moe_jax.serve.protocol_error import ProtocolError

_COMMON = (
    *("model", "stream", "stream_options", "seed", "temperature", "top_p", "max_tokens", "logprobs"),
    *("stop", "stop_token_ids", "ignore_eos"),
)
COMPLETION = (*_COMMON, "prompt", "echo")
"""Fields that are read of a request to `/v1/completions`."""
CHAT = (*_COMMON, "messages", "top_logprobs", "max_completion_tokens")
"""Fields that are read of a request to `/v1/chat/completions`."""
STREAM_OPTIONS = ("include_usage",)
"""Fields that are read of `stream_options`."""

# What is about the request and not the answer, or about tool calls and reasoning, which no answer has.
_ANY_VALUE = frozenset(
    (
        *("user", "safety_identifier", "metadata", "store", "service_tier", "request_id", "priority"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_prompt", "cache_salt"),
        *("parallel_tool_calls", "include_reasoning", "spaces_between_special_tokens", "include_obfuscation"),
    )
)

# null stands for a field that is absent, and changes no answer.
_UNCHANGED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "n": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    # how tokens are chosen, on other servers
    "top_k": (0, -1),
    "top_a": (0,),
    "min_p": (0,),
    "typical_p": (1,),
    "mirostat": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "grammar": ("",),
    "json_schema": (),
    # how prompts and answers are written, on other servers
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "chat_template_content_format": ("auto",),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "detokenize": (True,),
    "continuous_usage_stats": (False,),
    "extra_body": ({},),
}
# Where the two kinds of requests differ.
_UNCHANGED_HERE: dict[Collection[str], dict[str, tuple[Any, ...]]] = {
    COMPLETION: {"add_special_tokens": (True,), "top_logprobs": (), "max_completion_tokens": ()},
    CHAT: {"add_special_tokens": (False,), "echo": (False,)},
}


def check_fields(body: Mapping[str, Any], read: Collection[str]) -> None:
    """Raises `ProtocolError` with status 400 for a field that is not `read` and would, or may, change the answer."""
    unchanged = {**_UNCHANGED, **_UNCHANGED_HERE.get(read, {})}
    for name, value in body.items():
        if name in read or name in _ANY_VALUE:
            continue
        if name not in unchanged:
            hint = nearest(name, [*read, *unchanged])
            raise ProtocolError(400, f"unknown field {shown(name)}{hint}", param=name, code="unknown_parameter")
        if value is not None and not any(_is_same(value, one) for one in unchanged[name]):
            raise ProtocolError(
                400, f"{name}={shown(value)} is not supported; leave it out", param=name, code="unsupported"
            )


def _is_same(value: Any, other: Any) -> bool:
    """Whether values of JSON are equal, where 1 is 1.0, but not true."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
