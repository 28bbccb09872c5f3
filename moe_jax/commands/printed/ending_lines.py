"""Lines about texts that have ended: why they ended, how fast they came, and whether they were too long."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_jax.core.errors import shown

if TYPE_CHECKING:
    from moe_jax.api.generate import Continuation, Speed, Wanted
    from moe_jax.api.model import Model


def notes_on_length(model: "Model", results: Sequence["Continuation"], wanted: "Wanted") -> list[str]:
    """A note if texts may become longer than those that the model was trained for."""
    longest, added = max(len(result.prompt_ids) for result in results), wanted.max_new_tokens
    longest, most = max(longest, added) if model.config.has_encoder else longest + added, model.config.max_positions
    return [f"note: {longest} positions, but the model was trained for {most}"] if longest > most else []


def endings(results: Sequence["Continuation"]) -> list[str]:
    """Why texts ended: a line for each reason, with the numbers of the prompts if there are several."""
    rows: dict[str, list[int]] = {}
    for index, result in enumerate(results):
        rows.setdefault(_ending(result), []).append(index + 1)
    if len(results) == 1:
        return [f"ended {why}" for why in rows]
    return [f"{_numbers(numbers)} ended {why}" for why, numbers in rows.items()]


def show_speed(speed: "Speed") -> str:
    """Tokens, seconds and tokens per second in one line."""
    if speed.tokens == 1:
        return f"1 token in {speed.seconds:.1f} s"
    rate = f"the first after {speed.first:.1f} s, then {speed.per_second:.1f} a second"
    return f"{speed.tokens} tokens in {speed.seconds:.1f} s: {rate}"


def _ending(result: "Continuation") -> str:
    if result.reason == "length":
        return f"at {len(result.ids)} tokens (--max-new-tokens)"
    what = {"eos": "EOS", "stop_id": "--stop-ids", "stop": "--stop"}[result.reason]
    by = shown(result.ended_by) if result.reason == "stop" else result.ended_by
    return f"with {by} ({what})" if result.ids else f"at once with {by} ({what}): nothing was added"


def _numbers(numbers: Sequence[int]) -> str:
    """`prompts 1-3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    joined = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"prompt{'s' if len(numbers) > 1 else ''} {joined}"
