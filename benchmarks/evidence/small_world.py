"""Answers of models that see to the questions of the small world: the file of results, and the tables made of it."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from evidence.results import NoSettings, ResultsFile
from evidence.studies.verdicts import UNDECIDED, Effect, effect, no_worse
from evidence.tables import markdown
from moe_jax.demo.small_world import CHANCE

VANILLA = "vanilla MoE"
# Points of right answers in a hundred; written down before anything was measured.
LEAST = 3.0


class Claim(NamedTuple):
    """Attributes:
    figure: of DeRS's paper, or its table.
    says: the claim.
    these, those: the models compared.
    """

    figure: str
    says: str
    these: str
    those: str


CLAIMS = (
    Claim("Table 1", "Low-rank deltas are as good as whole copies", "DeRS-LM", VANILLA),
    Claim("Table 1", "Sparse deltas are as good as whole copies", "DeRS-SM", VANILLA),
    *(
        Claim("Figure 4", f"{share} of the trained deltas dropped at random cost nothing", f"{share} dropped", VANILLA)
        for share in ("90 %", "99 %")
    ),
    *(Claim("Figure 5", f"Trained deltas in {bits} cost nothing", bits, VANILLA) for bits in ("2 bits", "1 bit")),
)


class SmallWorldFile(ResultsFile):
    """`OUT/small_world.json`: by model and seed, of every question whether it was answered right, as 0 and 1; kinds of
    questions take turns, in the order of `CHANCE`. The minutes that a seed's models took. And `rates`: by kind and
    learning rate of stage 3, nats per token of unseen answers of another world."""

    names_at: ClassVar[dict[str, int]] = {"answers": 1, "rates": 1}

    def __init__(self, file: Path, *, writes: bool = False):
        """Opens the file; one that is not there yet is made if the program `writes`."""
        super().__init__(file, NoSettings() if writes else None)

    def put_answers(self, model: str, seed: int, **right: Sequence[bool]) -> None:
        """Stores whether the questions were answered right: `seen`, and `shuffled` if that was asked too."""
        self.put(
            "answers",
            model,
            str(seed),
            value={name: "".join("01"[one] for one in all_) for name, all_ in right.items()},
        )

    def answers(self, model: str, how: str = "seen") -> dict[str, list[int]]:
        """By seed, 1 for every question that was answered right."""
        found = self.get("answers", model) or {}
        return {seed: [int(one) for one in answers[how]] for seed, answers in found.items() if how in answers}


def tables(results: SmallWorldFile) -> dict[str, str]:
    """The tables, by names of their blocks."""
    return {
        "answers": _answers(results),
        "claims": _claims(results),
        "minutes": _minutes(results),
        "rates": _rates(results),
    }


def _answers(results: SmallWorldFile) -> str:
    """Of every model the mean over the seeds, and the lowest and highest of them, for all questions and by kinds."""
    rows = []
    for how, remark in (("seen", ""), ("shuffled", ", pictures shuffled")):
        for model in results.get("answers"):
            by_seed = results.answers(model, how).values()
            if by_seed:
                kinds = [[answers[place :: len(CHANCE)] for answers in by_seed] for place in range(len(CHANCE))]
                rows.append([f"{model}{remark}", *map(_percent, (list(by_seed), *kinds))])
    rows.append(
        ["by chance", *(f"{100 * share:.0f}" for share in (statistics.fmean(CHANCE.values()), *CHANCE.values()))]
    )
    return markdown(("right answers, %", "all", *CHANCE), rows)


def _percent(by_seed: Sequence[Sequence[int]]) -> str:
    shares = [100 * statistics.fmean(answers) for answers in by_seed]
    return f"{statistics.fmean(shares):.0f} ({min(shares):.0f} to {max(shares):.0f})"


def _claims(results: SmallWorldFile) -> str:
    rows = []
    for claim in CLAIMS:
        questions, seeds = _effects(results, claim)
        if questions and seeds:
            # Other questions and other trainings would both change it: what holds for the two of them, agrees.
            said = {no_worse(_loss(found), LEAST) for found in (questions, seeds)}
            verdict = said.pop() if len(said) == 1 else UNDECIDED
            rows.append([claim.figure, claim.says, str_of(questions), str_of(seeds), str(seeds.count), verdict])
    return markdown(
        ("DeRS", "claim", "points of right answers [95 %], other questions", "[95 %], other seeds", "seeds", "verdict"),
        rows,
    )


def _effects(results: SmallWorldFile, claim: Claim) -> tuple[Effect | None, Effect | None]:
    """What these answer right more than those, in points: over questions (means of the seeds), and over seeds."""
    these, those = results.answers(claim.these), results.answers(claim.those)
    by_seed = [
        [100.0 * (one - other) for one, other in zip(these[seed], those[seed], strict=True)]
        for seed in these
        if seed in those
    ]
    over_questions = [statistics.fmean(differences) for differences in zip(*by_seed, strict=True)]
    return effect(over_questions), effect([statistics.fmean(differences) for differences in by_seed])


def _loss(found: Effect) -> Effect:
    """The same, of what is lost."""
    return Effect(-found.mean, -found.high, -found.low, found.count)


def str_of(found: Effect) -> str:
    return f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def _minutes(results: SmallWorldFile) -> str:
    found = results.get("minutes") or {}
    names = list(dict.fromkeys(name for seed in found.values() for name in seed))
    rows = [
        [seed, *(f"{minutes.get(name, 0):.1f}" for name in names), f"{sum(minutes.values()):.1f}"]
        for seed, minutes in found.items()
    ]
    return markdown(("seed", *names, "all, minutes"), rows)


def _rates(results: SmallWorldFile) -> str:
    found = results.get("rates") or {}
    tried = sorted({rate for losses in found.values() for rate in losses}, key=float)
    rows = []
    for kind, losses in found.items():
        best = min(losses, key=losses.__getitem__)
        shown = {rate: f"**{loss:.4f}**" if rate == best else f"{loss:.4f}" for rate, loss in losses.items()}
        rows.append([kind, *(shown.get(rate, "") for rate in tried)])
    return markdown(("rate of stage 3", *tried), rows)
