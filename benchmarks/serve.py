"""Tokens per second that `moe-jax serve` gives to one request and to eight at once, over HTTP.

    python benchmarks/serve.py MODEL [--seats 8] [--tokens 64] [--rounds 3] [--out benchmarks/results]

MODEL is a language model with a tokenizer, such as SmolLM2-135M-Instruct. A server of one seat, and then one of SEATS,
is started as a user would; prompts of 12 to 40 words go to it, one alone and SEATS at once, by turns. Programs are
compiled before. Seconds are the median of the rounds, from the first request until the last answer is whole.
"""

import argparse
import concurrent.futures
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from evidence.layouts import SERVING
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT

_WORDS = "Once upon a time there was a small town by the sea where nobody had ever seen a ship come home again".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seats", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    measured: list[tuple[int, int, float]] = []
    for seats in (1, options.seats):
        with serving(options.model, seats) as address:
            counts = sorted({1, seats})
            for count in counts:
                answered(address, count, options.tokens)
            seconds: dict[int, list[float]] = {count: [] for count in counts}
            for _ in range(options.rounds):
                for count in counts:
                    seconds[count].append(answered(address, count, options.tokens))
            measured += [(seats, count, statistics.median(seconds[count])) for count in counts]
    alone = {seats: options.tokens / seconds for seats, count, seconds in measured if count == 1}
    rows = []
    for seats, count, seconds in measured:
        made = count * options.tokens
        rate = made / seconds
        rows.append([seats, count, made, seconds, rate, rate / alone[seats], rate / alone[1]])
    figures = Figures("serve", options.out, writes=True)
    figures.put_rows(SERVING.name, rows)
    print(SERVING.text(figures))


@contextlib.contextmanager
def serving(model: Path, seats: int) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "moe_jax.commands.cli", "serve", str(model), "--port", "0", "--name", "model"]
    arguments = [*command, "--seats", str(seats), "--context", "512"]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if not line:
                raise SystemExit("the server did not start")
            yield line.split(" at ")[1].split()[0]
        finally:
            server.terminate()


def answered(address: str, count: int, tokens: int) -> float:
    """Seconds until `count` requests that are sent together are answered with `tokens` each."""

    def ask(index: int) -> int:
        words = [_WORDS[(index + at) % len(_WORDS)] for at in range(12 + 4 * (index % 8))]
        # All answers have the same length, whatever the model says.
        body = {"model": "model", "prompt": " ".join(words), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{address}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["usage"]["completion_tokens"]

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        made = list(pool.map(ask, range(count)))
    seconds = time.perf_counter() - start
    if made != [tokens] * count:
        raise SystemExit(f"answers of {made} tokens, expected {tokens} each")
    return seconds


if __name__ == "__main__":
    main()
