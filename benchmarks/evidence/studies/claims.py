"""The claims of the papers that can be tested here, each with the smallest effect that would matter."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from evidence.results import ResultsFile
from evidence.studies.compression_plan import COMPRESSION
from evidence.studies.compressions import UNCOMPRESSED
from evidence.studies.scales import SMOLLM, STORIES
from evidence.studies.shapes import EXPERTS
from evidence.studies.summary import Measured, difference
from evidence.studies.variants import DENSE_BASE, MEAN_BASE, label
from evidence.studies.verdicts import Effect, better, equal, no_worse

Verdict = Callable[[Effect, float], str]
# Nats per token: one percent of perplexity.
LEAST = 0.01


@dataclasses.dataclass(frozen=True)
class Claim:
    """What one thing is, compared with another, over seeds.

    Attributes:
      paper: who says it.
      says: the claim, in a sentence.
      these, those: what is compared; the effect is the loss of these less that of those.
      verdict: what the effect says.
      least: the smallest effect of interest, nats per token.
      model: only settings of this model; None: of all.
      about: the statement that it is one case of; None: `says` is that.
    """

    paper: str
    says: str
    these: Measured
    those: Measured
    verdict: Verdict = better
    least: float = LEAST
    model: str | None = None
    about: str | None = None

    @property
    def statement(self) -> str:
        return self.about or self.says

    def effects(self, results: ResultsFile) -> Iterator[tuple[str, Effect]]:
        """Of every setting that there are results of both in."""
        those = self.those.runs(results)
        for setting, runs in self.these.runs(results).items():
            found = difference(runs, those.get(setting, {}))
            if found is not None and (self.model is None or setting.startswith(self.model)):
                yield setting, found


def _claims(study: str, paper: str, *rows: tuple, about: str | None = None) -> list[Claim]:
    """Claims about shapes of one study: what is said, the two shapes, and the verdict if it is not `better`."""
    return [
        Claim(paper, says, Measured(study, these), Measured(study, those), *verdict, about=about)
        for says, these, those, *verdict in rows
    ]


_DELTAS = {
    "Low-rank deltas": [f"LM r={rank}" for rank in (1, 4, 16, 64)],
    "Sparse deltas": [f"SM {share}" for share in ("0.9", "0.99", "0.999")],
}


def _of_deltas(about: str, row: Callable[[str], tuple]) -> Iterator[Claim]:
    """A claim about every shape with deltas: `about` is the statement, with the kind of deltas in its place."""
    for kind, shapes in _DELTAS.items():
        yield from _claims("upcycling", "DeRS", *map(row, shapes), about=about.format(kind))


def _deltas() -> list[Claim]:
    return [
        *_claims("upcycling", "ours", ("Upcycled models beat the dense model trained as long", "vanilla", "as it is")),
        *_of_deltas(
            "{} are as good as whole copies",
            lambda shape: (f"{shape}: as good as whole copies", shape, "vanilla", no_worse),
        ),
        *_of_deltas(
            "{}: to freeze the base costs",
            lambda shape: (f"{shape}: to freeze the base costs", shape, f"{shape}, frozen base"),
        ),
        *_claims(
            "upcycling",
            "DeRS",
            *((f"LM r={rank}: as good as rank 64", f"LM r={rank}", "LM r=64", no_worse) for rank in (1, 4, 16)),
            about="Low ranks are as good as a rank of 64",
        ),
        *_claims(
            "upcycling",
            "DeRS",
            ("The universal FFN can be one more delta", "LM r=4, extended", "LM r=4, universal", no_worse),
        ),
        *_claims("upcycling", "ours", ("A universal FFN beside the experts helps", "LM r=4, universal", "LM r=4")),
    ]


def _pesc() -> list[Claim]:
    """The paper holds experts against the same LoRA without them. That they beat a larger LoRA, which trains as much,
    is more than it says."""
    return [
        *_claims("pesc", "PESC", ("Over many domains, experts beside the same LoRA help", "PESC 8 LoRA 8", "LoRA 8")),
        *_claims(
            "pesc",
            "ours",
            ("Over many domains, experts beat a larger LoRA that trains as much", "PESC 8 LoRA 8", "LoRA 16"),
            ("The same over NF4", "PESC 8 QLoRA 8", "QLoRA 16"),
        ),
    ]


_MODEL_EXPERTS = {STORIES.name: EXPERTS, SMOLLM.name: 4}
"""Experts of the MoEs that are tuned: E has as many adapters."""


def _perft() -> list[Claim]:
    found = []
    for sizes, rank in (("2/8", 2), ("2/8", 8), ("2/8", 32), ("2/4", 8)):
        found += _of_equal_parameters("perft", sizes, rank, embedded=sizes == "2/8")
    found += _claims(
        "perft",
        "PERFT",
        (
            "R that chooses two of eight not worse than all eight, rank 8",
            "PERFT-R 2/8 r=8",
            "PERFT-R 8/8 r=8",
            no_worse,
        ),
    )
    ranks = (2, 4, 8, 16, 32, 64)
    found += _claims(
        "perft",
        "PERFT",
        *(
            (f"S of rank {low} better than S of rank {high}", f"PERFT-S r={low}", f"PERFT-S r={high}")
            for low, high in zip(ranks, ranks[2:], strict=False)
        ),
        about="S gets worse with its rank",
    ) + _claims(
        "perft",
        "PERFT",
        *(
            (f"S better than D of {count} adapters, rank {rank}", f"PERFT-S r={rank}", f"PERFT-D {count} r={rank}")
            for count in (2, 4)
            for rank in (2, 8, 32)
        ),
        about="Several dense adapters are worse than one of their rank",
    )
    ours = _claims(
        "perft",
        "ours",
        *(
            (f"Control: D of 4 adapters of rank {rank} is S of rank {4 * rank}", f"PERFT-D 4 r={rank}",
             f"PERFT-S r={4 * rank}", equal)
            for rank in (2, 8)
        ),
        about="Control: D of M adapters is S of M times the rank",
    ) + _claims(
        "perft",
        "ours",
        ("The base router's weights on R, as in public code, cost", "PERFT-R 2/8 r=8",
         "PERFT-R 2/8 r=8, weights of the base's router"),
    )  # fmt: skip
    return [*found, *_routed_or_embedded(), *_of_many_experts(), *ours]


def _of_equal_parameters(study: str, sizes: str, rank: int, *, embedded: bool, within: str = "") -> list[Claim]:
    """R, and E, beside what trains or multiplies as much.

    With two of their adapters for a token, and two experts, R and E of a rank have as many active parameters as S of
    twice the rank, but for R's router.

    Args:
      study: of the results.
      sizes: active adapters of R, and all.
      rank: of the adapters.
      embedded: whether E is compared, too.
      within: is added to what is said, so that no other study says the same.
    """
    of_equal, of_lora = "above S of equal active parameters", "above LoRA on q and v"
    routed, single, lora = f"PERFT-R {sizes} r={rank}", f"PERFT-S r={2 * rank}", f"LoRA q,v r={rank}"
    rows = [("R", f" ({sizes})", of_equal, routed, single), ("R", f" ({sizes})", of_lora, routed, lora)]
    if embedded:
        rows.append(("E", "", of_equal, f"PERFT-E r={rank}", single))
    return [
        claim
        for kind, which, than, these, those in rows
        for claim in _claims(
            study, "PERFT", (f"{kind}{which} {than}, rank {rank}{within}", these, those), about=f"{kind} {than}"
        )
    ]


def _of_many_experts() -> list[Claim]:
    """The paper's E falls behind R where a token has a small share of many experts."""
    study, routed, embedded = "perft of many experts", "PERFT-R 2/16 r=8", "PERFT-E r=8"
    return [
        *_claims(study, "PERFT", ("With 16 experts, R of as many adapters above E", routed, embedded)),
        *_of_equal_parameters(study, "2/16", 8, embedded=True, within=", 16 experts"),
        *_claims(
            study,
            "ours",
            ("E with SiLU above E of LoRA adapters", "PERFT-E with SiLU r=8", embedded),
            ("S with SiLU above S of a LoRA adapter", "PERFT-S with SiLU r=16", "PERFT-S r=16"),
            about="Adapters with SiLU are better than those of LoRA",
        ),
    ]


def _routed_or_embedded() -> Iterator[Claim]:
    """R beside E: the paper has E above R of as many adapters, and R of fewer above E."""
    for adapters, rank in ((8, 2), (8, 8), (8, 32), (4, 8)):
        routed, embedded = (Measured("perft", name) for name in (f"PERFT-R 2/{adapters} r={rank}", f"PERFT-E r={rank}"))
        for model, experts in _MODEL_EXPERTS.items():
            if adapters == experts:
                about = "E above R of as many adapters"
                yield Claim("PERFT", f"{about}, rank {rank}", embedded, routed, model=model, about=about)
            else:
                says, about = f"R of {adapters} adapters above E, rank {rank}", "R of fewer adapters above E"
                yield Claim("PERFT", says, routed, embedded, model=model, about=about)


def _beginnings() -> list[Claim]:
    texts = "vanilla, 3 experts, routers from texts"
    return [
        *_claims("upcycling", "Drop-Upcycling", ("Half of the neurons drawn anew help", "drop 0.5", "vanilla")),
        *_claims(
            "upcycling",
            "He et al. 2024",
            ("Granular experts (2) help", "granularity 2", "vanilla"),
        ),
        *_claims(
            "upcycling",
            "He et al. 2024",
            ("Noise of 1 % on copies helps", "noise 0.01", "vanilla"),
            ("Noise of 10 % on copies helps", "noise 0.1", "vanilla"),
            about="Noise on copies helps",
        ),
        *_claims("upcycling", "mergekit", ("Routers from texts of the domains help", texts, "vanilla, 3 experts")),
        *_claims(
            "mixed branches",
            "Branch-Train-MiX",
            ("Experts from models of one domain each beat copies of one that read as much", "experts from models",
             "vanilla, 3 experts"),
        ),
    ]  # fmt: skip


def _compressed() -> list[Claim]:
    resmoe, whole, kept = _quarter("ResMoE UP"), Measured(COMPRESSION, UNCOMPRESSED), "at a kept share of a quarter"
    baselines = ("UP", "SP", "SVD", "M-SMoE", "MEO", "Git Re-Basin", "MLP Fusion")
    found = [Claim("ResMoE", f"Better than {name} {kept}", resmoe, _quarter(name)) for name in baselines]
    found += [
        Claim("ResMoE", f"Better than around the average of unmatched experts, {kept}", resmoe,
              _quarter("average + UP")),
        Claim("ResMoE", f"Better than around the average of permuted experts, {kept}",
              _quarter("ResMoE UP of permuted experts"), _quarter("average + UP of permuted experts")),
        Claim("ResMoE", f"Pruned residuals better than low-rank ones, {kept}", resmoe, _quarter("ResMoE SVD")),
        Claim("ours", f"Refitting the centre helps, {kept}", resmoe, _quarter("ResMoE UP, no refit")),
        Claim("ours", "ResMoE at 4.125 bits per weight better than plain rounding to 4 bits",
              _compression("ResMoE, budget", 4.125), _compression("plain quantisation", 4)),
    ]  # fmt: skip
    # These two were named when those of stories260K had been seen. With eight experts they have as many bytes; with
    # SmolLM2's four, whose mean weighs twice as much for each, deltas have two bits more.
    for bits, plain in ((1, 3), (2, 4)):
        says = f"Deltas over the mean in {_bits(bits)} better than plain rounding to {plain} bits"
        deltas = _compression(f"quantised deltas {MEAN_BASE}", bits)
        about = "Deltas over the mean better than plain rounding to two bits more"
        found.append(Claim("ours", says, deltas, _compression("plain quantisation", plain), about=about))
    for bits in (4, 2, 1):
        for base in (DENSE_BASE, MEAN_BASE):
            deltas = _compression(f"quantised deltas {base}", bits)
            says, about = f"Deltas {base} in {_bits(bits)} cost nothing", f"Deltas {base} in few bits cost nothing"
            found.append(Claim("DeRS", says, deltas, whole, no_worse, about=about))
    for share in (0.6, 0.9, 0.99):
        dropped = _compression(f"random drops {DENSE_BASE}", share)
        says = f"{100 * share:g} % of the deltas {DENSE_BASE} dropped at random cost nothing"
        about = f"Most of the deltas {DENSE_BASE} can be dropped at random"
        found.append(Claim("DeRS", says, dropped, whole, no_worse, about=about))
    return found


def _bits(count: int) -> str:
    return f"{count} bit" + "s" * (count > 1)


def _quarter(name: str) -> Measured:
    return _compression(name, 0.25)


def _compression(name: str, value: float) -> Measured:
    return Measured(COMPRESSION, label(name, value))


CLAIMS: Sequence[Claim] = (*_deltas(), *_pesc(), *_perft(), *_beginnings(), *_compressed())
