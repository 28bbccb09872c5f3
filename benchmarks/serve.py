"""Tokens per second that `moe-jax serve` gives to one request and to eight at once, over HTTP.

    python benchmarks/serve.py MODEL [--seats 8] [--tokens 64] [--rounds 3] [--against CHECKOUT] [--out FOLDER]

MODEL is a language model with a tokenizer, such as SmolLM2-135M-Instruct. A server of one seat, and then one of SEATS,
is started as a user would; prompts of 12 to 40 words go to it, one alone and SEATS at once, by turns. Programs are
compiled before. Seconds are the median of the rounds, from the first request until the last answer is whole.

CHECKOUT is a folder with an older commit of this project, whose server is started beside this one: both are asked by
turns, and the ratio of every round counts.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from evidence.layouts import SERVING, SERVING_BEFORE
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
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="an older commit, to be compared with")
    options = parser.parse_args()
    figures = Figures("serve", options.out, writes=True)
    if options.against is not None:
        compare(options, figures)
        print(SERVING_BEFORE.text(figures))
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
    figures.put_rows(SERVING.name, rows)
    print(SERVING.text(figures))


def compare(options: argparse.Namespace, figures: Figures) -> None:
    """Measures this code's server and an older one's by turns: for texts nothing may have become slower."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=options.against, capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = []
    for seats in (1, options.seats):
        with serving(options.model, seats) as now, serving(options.model, seats, options.against) as before:
            for address in (now, before):
                answered(address, seats, options.tokens)
            pairs = []
            for number in range(options.rounds):
                # Whoever is asked second may find a warmer machine, or a busier one.
                order = (now, before) if number % 2 else (before, now)
                seconds = {address: answered(address, seats, options.tokens) for address in order}
                pairs.append((seconds[now], seconds[before]))
        ratios = [one / other for one, other in pairs]
        medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
        rows.append([seats, seats, commit, *medians, statistics.median(ratios), min(ratios), max(ratios), len(ratios)])
    figures.put_rows(SERVING_BEFORE.name, rows)


@contextlib.contextmanager
def serving(model: Path, seats: int, checkout: Path = ROOT) -> Iterator[str]:
    """The address of a server in a process of its own, of the code in a folder."""
    command = [sys.executable, "-m", "moe_jax.commands.cli", "serve", str(model), "--port", "0", "--name", "model"]
    arguments = [*command, "--seats", str(seats), "--context", "512"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    with subprocess.Popen(arguments, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True) as server:
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
