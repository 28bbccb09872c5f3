"""The claims of the papers that can be tested here, each with the smallest effect that would matter."""

import dataclasses
from collections.abc import Callable, Sequence

from evidence.results import ResultsFile
from evidence.studies.summary import losses_of
from evidence.studies.verdicts import Effect, better, effect, equal, no_worse, paired

Verdict = Callable[[Effect, float], str]
# Nats per token: one percent of perplexity.
LEAST = 0.01


@dataclasses.dataclass(frozen=True)
class Claim:
    """What one thing is, compared with another, over seeds.

    Attributes:
      paper: who says it.
      says: the claim, in a sentence.
      study: whose results decide it.
      these, those: shapes that are compared; the effect is the loss of these less that of those.
      verdict: what the effect says.
      least: the smallest effect of interest, nats per token; named before anything was measured.
    """

    paper: str
    says: str
    study: str
    these: str
    those: str
    verdict: Verdict = better
    least: float = LEAST

    def effect(self, results: ResultsFile, scale: str) -> Effect | None:
        """Of one scale; None where there are no results of both."""
        these, those = (losses_of(results, self.study, scale, shape) for shape in (self.these, self.those))
        return effect(paired(these, those))


def _deltas() -> list[Claim]:
    shapes = [f"LM r={rank}" for rank in (1, 4, 16, 64)] + [f"SM {share}" for share in ("0.9", "0.99", "0.999")]
    return [
        Claim("DeRS", "Upcycled models beat the dense model trained as long", "upcycling", "vanilla", "as it is"),
        *(
            Claim("DeRS", f"{shape}: as good as whole copies", "upcycling", shape, "vanilla", no_worse)
            for shape in shapes
        ),
        *(
            Claim("DeRS", f"{shape}: the base can stay frozen", "upcycling", f"{shape}, frozen base", shape, no_worse)
            for shape in shapes
        ),
        Claim("DeRS", "A universal FFN beside the experts helps", "upcycling", "LM r=4, universal", "LM r=4"),
        Claim("DeRS", "The universal FFN can be one more delta", "upcycling", "LM r=4, extended", "LM r=4, universal",
              no_worse),
    ]  # fmt: skip


def _pesc() -> list[Claim]:
    return [
        Claim("PESC", "Over many domains better than LoRA that trains as much", "pesc", "PESC 8 LoRA 8", "LoRA 16"),
        Claim("PESC", "The same over NF4", "pesc", "PESC 8 QLoRA 8", "QLoRA 16"),
    ]


def _perft() -> list[Claim]:
    found = []
    for rank in (2, 8, 32):
        # With two of eight adapters for a token, and two experts, R and E of a rank have as many active parameters as
        # S of twice the rank, but for R's router.
        routed, embedded, single = f"PERFT-R 2/8 r={rank}", f"PERFT-E r={rank}", f"PERFT-S r={2 * rank}"
        found += [
            Claim("PERFT", f"R above S of equal active parameters, rank {rank}", "perft", routed, single),
            Claim("PERFT", f"E above S of equal active parameters, rank {rank}", "perft", embedded, single),
            Claim("PERFT", f"R above E, rank {rank}", "perft", routed, embedded),
            Claim("PERFT", f"R above LoRA on q and v, rank {rank}", "perft", routed, f"LoRA q,v r={rank}"),
        ]
    found += [
        Claim("control", "D of M adapters of rank r is S of rank M r", "perft", "PERFT-D 4 r=8", "PERFT-S r=32", equal),
        Claim("control", "D of M adapters of rank r is S of rank M r", "perft", "PERFT-D 4 r=2", "PERFT-S r=8", equal),
        Claim("PERFT", "Sparse routing is above all adapters at once, rank 8", "perft", "PERFT-R 2/8 r=8",
              "PERFT-R 8/8 r=8"),
        Claim("ours", "The weights of the base's router on R, as in public code, cost", "perft", "PERFT-R 2/8 r=8",
              "PERFT-R 2/8 r=8, weights of the base's router"),
    ]  # fmt: skip
    return found


def _beginnings() -> list[Claim]:
    return [
        Claim("Drop-Upcycling", "Neurons drawn anew (half) help", "upcycling", "drop 0.5", "vanilla"),
        Claim("He et al. 2024", "Granular experts (2) help", "upcycling", "granularity 2", "vanilla"),
        Claim("He et al. 2024", "Noise of 1 % on copies helps", "upcycling", "noise 0.01", "vanilla"),
        Claim("He et al. 2024", "Noise of 10 % on copies helps", "upcycling", "noise 0.1", "vanilla"),
        Claim("mergekit", "Routers from texts of the domains help", "upcycling",
              "vanilla, 3 experts, routers from texts", "vanilla, 3 experts"),
        Claim("Branch-Train-MiX", "Experts from models of one domain each beat copies of one that read as much",
              "mixed branches", "experts from models", "vanilla, 3 experts"),
    ]


CLAIMS: Sequence[Claim] = (*_deltas(), *_pesc(), *_perft(), *_beginnings())
