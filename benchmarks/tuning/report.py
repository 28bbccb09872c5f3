"""The report, made from the results alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from evidence.tables import markdown
from quality.spread import mean_and_spread
from tuning.checks import check_findings
from tuning.findings import tuned_findings, upcycled_findings
from tuning.kinds import DENSE, DENSE_LORA, KINDS, VANILLA
from tuning.plots import plot_tuned, plot_upcycled
from tuning.results import Results
from tuning.summary import curve, difference, losses, points, runs
from tuning.texts import DOMAINS
from tuning.variants import FAMILIES, FULL, LORA_QV, LORA_ROUTER, D, E, R, S, Variant, variants

_NAME = "peft_quality"
_SHAKESPEARE = "shakespeare"
_LOSS = "mean ± standard deviation over {} seeds, held-out loss in nats per token"


def write_report(results: Results, out: Path) -> str:
    """Writes `peft_quality.md` and the plots; returns the Markdown."""
    text, domains = report(results), _domains(results)
    (out / f"{_NAME}.md").write_text(text)
    if results.get("upcycled", _SHAKESPEARE):
        plot_upcycled(results, out / f"{_NAME}_pesc.png")
    if domains:
        plot_tuned(results, domains, out / f"{_NAME}_perft.png")
    return text


def report(results: Results) -> str:
    """The Markdown; empty if there are no results."""
    domains = _domains(results)
    sections = [
        _upcycled_table(results),
        _bases(results),
        _tuned_table(results, domains),
        *(_section(f"Against the paper: {name}", tuned_findings(results, name)) for name in domains),
        _section("Checks", check_findings(results)),
        _section("PESC in brief", _pesc_in_brief(results)),
        _section("PERFT in brief", _perft_in_brief(results, domains)),
    ]
    text = "\n\n".join(section for section in sections if section)
    return f"{text}\n" if text else ""


def _domains(results: Results) -> list[str]:
    return [name for name in DOMAINS if results.get("tuned", name)]


def _upcycled_table(results: Results) -> str:
    dense, vanilla = (losses(results, "upcycled", _SHAKESPEARE, name) for name in (DENSE, VANILLA))
    rows, seeds = [], 0
    for name in KINDS:
        found = losses(results, "upcycled", _SHAKESPEARE, name)
        if not found:
            continue
        seeds = max(seeds, len(found))
        run = next(iter(runs(results, "upcycled", _SHAKESPEARE, name).values()))
        rows.append(
            [
                name,
                f"{run['trained_params']:,}",
                f"{run['learning_rate']:g}",
                mean_and_spread(found.values()),
                "" if name == DENSE else mean_and_spread(difference(found, dense), "+.4f"),
                "" if name == VANILLA else mean_and_spread(difference(found, vanilla), "+.4f"),
            ]
        )
    if not rows:
        return ""
    settings = results.settings
    note = (
        f"TinyShakespeare, {_LOSS.format(seeds)}, differences seed by seed; {settings.upcycled_steps} steps of "
        f"{settings.batch_size} x {settings.seq_len} tokens for all. PESC a: adapters of width a beside every FFN, "
        f"{settings.num_experts} experts, top-{settings.top_k}, as vanilla; LoRA and QLoRA of rank "
        f"{settings.rest_rank} on every matrix of attention and FFN. Learning rates: the best of those tried (`rates` "
        "in the JSON) on a validation text, with a seed of its own; QLoRA's is LoRA's, width 64 has that of 8."
    )
    head = ["model", "trained parameters", "learning rate", "held-out loss", "against dense", "against vanilla"]
    table = markdown(head, rows)
    return _section("stories260K to PESC", "\n\n".join(filter(None, (table, note, upcycled_findings(results)))))


def _bases(results: Results) -> str:
    by_seed = [base["held_out"] for base in (results.get("bases") or {}).values()]
    if not by_seed:
        return ""
    texts = list(by_seed[0])
    rows = [[mean_and_spread([base[name] for base in by_seed if name in base]) for name in texts]]
    settings = results.settings
    note = (
        f"One base for every seed: stories260K with {settings.num_experts} copies of every FFN, top-{settings.top_k}, "
        f"trained {settings.base_steps} steps of {settings.base_batch_size} x {settings.seq_len} tokens on TinyStories "
        "and TinyShakespeare. Held-out loss before it is tuned."
    )
    return _section("The MoEs that are tuned", f"{markdown(texts, rows)}\n\n{note}")


def _tuned_table(results: Results, domains: Sequence[str]) -> str:
    rows, seeds = [], 0
    for variant in _ordered(variants(results.settings)):
        by_domain = [runs(results, "tuned", domain, variant.name) for domain in domains]
        some = [run for by_seed in by_domain for run in by_seed.values()]
        if not some:
            continue
        seeds = max(seeds, *map(len, by_domain))
        rows.append(
            [
                variant.name,
                f"{some[0]['trained_params']:,}",
                f"{some[0]['active_params']:,}" if some[0]["active_params"] else "",
                f"{some[0]['learning_rate']:g}",
                *(mean_and_spread(run["loss"] for run in by_seed.values()) for by_seed in by_domain),
            ]
        )
    if not rows:
        return ""
    settings = results.settings
    note = (
        f"{_LOSS.format(seeds).capitalize()}; {settings.tuned_steps} steps of {settings.batch_size} x "
        f"{settings.seq_len} tokens. PERFT-R M/K, PERFT-D M; r: rank. Active: trained parameters that a token meets. "
        "Adapters have LoRA's shape and scale 2, parallel ones a SiLU and scale 1; the balance losses of all routers "
        f"are on. Learning rates: the best of four on a validation text of {domains[0]}, with a seed of its own, for "
        "small, middling and large ranks of every family."
    )
    head = ["variant", "trained", "active", "learning rate", *domains]
    return _section("PERFT beside a trained MoE", f"{markdown(head, rows)}\n\n{note}")


def _pesc_in_brief(results: Results) -> str:
    """Every kind in as few rows as there are widths."""
    groups = {
        "dense / dense with LoRA": [DENSE, DENSE_LORA],
        "vanilla MoE": [VANILLA],
        **{
            f"PESC a={width}: rest full / LoRA / QLoRA / frozen": [
                f"PESC {width}, rest {rest}" for rest in ("full", "LoRA", "QLoRA", "frozen")
            ]
            for width in (8, 64)
        },
    }
    rows = []
    for label, names in groups.items():
        found = [runs(results, "upcycled", _SHAKESPEARE, name) for name in names]
        if all(found):
            first = [next(iter(by_seed.values())) for by_seed in found]
            rows.append(
                [
                    label,
                    " / ".join(f"{run['trained_params']:,}" for run in first),
                    " / ".join(f"{run['learning_rate']:g}" for run in first),
                    " / ".join(mean_and_spread((run["loss"] for run in by_seed.values()), ".3f") for by_seed in found),
                ]
            )
    return markdown(["model", "trained", "learning rate", "loss"], rows) if rows else ""


def _perft_in_brief(results: Results, domains: Sequence[str]) -> str:
    """The main variants over their ranks."""
    settings, rows = results.settings, []
    lines = {
        f"R, 8 adapters, {settings.top_k} for a token": (R, 8),
        "E": (E, settings.num_experts),
        "D, 2 adapters": (D, 2),
        "D, 8 adapters": (D, 8),
        "S": (S, 1),
        "LoRA on q, v": (LORA_QV, 1),
        "LoRA on the router": (LORA_ROUTER, 1),
        "full fine-tuning": (FULL, 1),
    }
    by_domain = [points(results, domain) for domain in domains]
    for label, (family, experts) in lines.items():
        found = [curve(every, family, experts, settings) for every in by_domain]
        # The ranks between stand in the table of all variants.
        found = [[point for point in line if point.variant.rank not in (4, 16)] for line in found]
        if not found or not all(found):
            continue
        ranks = " / ".join(str(point.variant.rank) for point in found[0] if point.variant.rank)
        rows.append(
            [
                f"{label}, r = {ranks}" if ranks else label,
                " / ".join(f"{point.active:,}" for point in found[0] if point.active),
                " / ".join(f"{point.rate:g}" for point in found[0]),
                *(" / ".join(f"{point.mean:.3f}" for point in line) for line in found),
            ]
        )
    return markdown(["variant", "active", "learning rate", *domains], rows) if rows else ""


def _ordered(every: Iterable[Variant]) -> list[Variant]:
    families = (*FAMILIES, FULL)

    def place(variant: Variant) -> tuple:
        return families.index(variant.family), variant.parallel, variant.experts, variant.top_k or 0, variant.rank

    return sorted(every, key=place)


def _section(title: str, content: str) -> str:
    return f"## {title}\n\n{content}" if content else ""
