"""The plan: what is trained, tuned and compressed at which scale, how long and how often."""

import dataclasses
from collections.abc import Sequence

from evidence.results import Key
from evidence.studies import compression_plan
from evidence.studies.jobs import Place, Study
from evidence.studies.long_job import train_middle, train_smollm_moe
from evidence.studies.scales import MIDDLE, PILOT_SEEDS, SEEDS, SMOLLM, STORIES, Scale
from evidence.studies.texts import DOMAINS
from evidence.studies.training_job import DENSE, SELECTION
from evidence.studies.trainings import Kept, Trainings

AS_IT_IS, VANILLA, EVERY_LAYER = "as it is", "vanilla", "vanilla, every layer"
THREE, FOUR = "vanilla, 3 experts", "vanilla, 4 experts"
SIXTEEN = "vanilla, 16 experts, every layer"
# The same recipe on another kind of machine, whose sums are rounded otherwise: PERFT began with the model of the first,
# which is not there any more, and what is compressed is that of the second.
AGAIN = f"{FOUR}, trained again"
PROMPTED, BRANCHES, DRAWN = f"{THREE}, routers from texts", "experts from models", "vanilla, from random weights"

_RANKS = tuple(f"LM r={rank}" for rank in (4, 16, 1, 64))
_SHARES = tuple(f"SM {share}" for share in ("0.9", "0.99", "0.999"))
_WITH_DELTAS = (*_RANKS, *_SHARES)
# Shapes, the most telling first, and that whose learning rates they take: their own, or that of what they are a small
# change of.
_UPCYCLED = {
    **{shape: shape for shape in (AS_IT_IS, VANILLA, *_WITH_DELTAS)},
    **{f"LM r=4, {change}": "LM r=4, universal" for change in ("universal", "extended")},
    **{shape: shape for shape in ("drop 0.5", "granularity 2", THREE)},
    **{"noise 0.01": VANILLA, "noise 0.1": VANILLA, PROMPTED: THREE},
    **{f"{shape}, frozen base": f"{shape}, frozen base" for shape in _WITH_DELTAS},
}
_MIDDLE = (AS_IT_IS, VANILLA, "LM r=16", "SM 0.9", "LM r=16, frozen base")
# Beside LoRA of rank 8 alone, PESC trains as much as LoRA of rank 16, or a little less.
_PESC = {name: name for name in ("LoRA 16", "PESC 8 LoRA 8", "QLoRA 16", "PESC 8 QLoRA 8", "LoRA 8", "PESC 8 frozen")}


def _perft(ranks: tuple[int, ...]) -> dict[str, str]:
    """Every variant at every rank, with rates of its own."""
    names = []
    for rank in ranks:
        names += [f"PERFT-R 2/8 r={rank}", f"PERFT-E r={rank}", f"PERFT-S r={2 * rank}", f"LoRA q,v r={rank}"]
        names += [f"PERFT-S r={rank}", *(f"PERFT-D {count} r={rank}" for count in (4, 2))]
        names += [f"PERFT-R {sizes} r={rank}" for sizes in ("1/1", "1/4", "2/4", "8/8")]
    names += ["PERFT-R 2/8 r=8, weights of the base's router", "LoRA router r=8", AS_IT_IS]
    return {name: name for name in names}


def _of_many_experts() -> list[Study]:
    """PERFT of a model with twice as many experts, of which a token has a smaller share; and adapters with SiLU."""
    bases = Trainings(
        "bases", STORIES, {SIXTEEN: SIXTEEN}, 500, 250, SEEDS, mixture="earlier", keep=frozenset((SIXTEEN,))
    )
    names = ("PERFT-R 2/16 r=8", "PERFT-E r=8", "PERFT-S r=16", "PERFT-E with SiLU r=8", "PERFT-S with SiLU r=16")
    shapes = {name: name for name in (*names, "LoRA q,v r=8")}
    start = f"{SIXTEEN}-s{{seed}}"
    return [bases, _after([bases], Trainings("perft of many experts", STORIES, shapes, 150, 150, SEEDS, start))]


def _permuted() -> list[Study]:
    """Vanilla MoEs whose experts lose their common order: as good as those that are compressed in all ways."""
    again = Trainings(
        "upcycling again",
        STORIES,
        {VANILLA: VANILLA},
        500,
        250,
        SEEDS,
        keep=frozenset((VANILLA,)),
        keep_as=f"{VANILLA}, trained again-s{{seed}}",
    )
    return [again, *compression_plan.of_permuted(*_kept_of(again, VANILLA))]


def studies(place: Place) -> list[Study]:
    """All of the plan that can be done with what there is, in the order in which it is worked on."""
    every = [*_small(), *_middle(), *([] if place.smollm is None else _smollm())]
    # What takes an hour or two, and much waits for, first: beside it, the other workers do what is short.
    return sorted(every, key=lambda study: not isinstance(study, Kept))


def _small() -> list[Study]:
    """Of stories260K."""
    bases = Trainings(
        "bases", STORIES, {EVERY_LAYER: EVERY_LAYER}, 500, 250, SEEDS, mixture="earlier", keep=frozenset((EVERY_LAYER,))
    )
    upcycled = Trainings("upcycling", STORIES, _UPCYCLED, 500, 250, SEEDS, keep=frozenset((VANILLA,)))
    return [
        # With seeds and texts that are not reported. In it, vanilla was better than dense by four times the spread of
        # their difference over seeds; runs that are reported are twice as long.
        Trainings("pilot", STORIES, {AS_IT_IS: AS_IT_IS, VANILLA: VANILLA}, 250, 250, PILOT_SEEDS, split=SELECTION),
        upcycled,
        Trainings("pesc", STORIES, _PESC, 300, 150, SEEDS),
        *compression_plan.of_stories(*_kept_of(upcycled, VANILLA)),
        bases,
        _after([bases], Trainings("perft", STORIES, _perft((8, 2, 32)), 150, 150, SEEDS, f"{EVERY_LAYER}-s{{seed}}")),
        *_branches(STORIES, steps=300, together=500),
        *_of_many_experts(),
        *_permuted(),
    ]


def _middle() -> list[Study]:
    """Of a dense model of our own."""
    dense = Kept(MIDDLE.name, DENSE, train_middle, {})
    after = ((dense.path, DENSE),)
    upcycled = {shape: like for shape, like in _UPCYCLED.items() if shape in _MIDDLE}
    vanilla = Trainings("upcycling", MIDDLE, upcycled, 300, 150, SEEDS, keep=frozenset((VANILLA,)), after=after)
    # Nothing of the dense model but its config and its tokenizer.
    drawn = Trainings("from random weights", MIDDLE, {DRAWN: DRAWN}, 1000, 150, SEEDS, keep=frozenset((DRAWN,)))
    return [
        dense,
        vanilla,
        drawn,
        *compression_plan.of_middle(*_kept_of(vanilla, VANILLA), upcycled=True),
        *compression_plan.of_middle(*_kept_of(drawn, DRAWN), upcycled=False),
    ]


def _smollm() -> list[Study]:
    """Of SmolLM2-135M, which knows something."""
    moe = Kept(SMOLLM.name, FOUR, train_smollm_moe, {"shape": FOUR, "name": FOUR})
    again = Kept(SMOLLM.name, AGAIN, train_smollm_moe, {"shape": FOUR, "name": AGAIN}, threads=2)
    pesc = {name: name for name in ("LoRA 16", "PESC 8 LoRA 8", "QLoRA 16", "PESC 8 QLoRA 8")}
    perft = {name: name for name in ("PERFT-R 2/4 r=8", "PERFT-E r=8", "PERFT-S r=16", "LoRA q,v r=8")}
    return [
        moe,
        again,
        Trainings("pesc", SMOLLM, pesc, 100, 50, SEEDS),
        Trainings("perft", SMOLLM, perft, 100, 50, SEEDS, FOUR, after=((moe.path, FOUR),), mixture="shakespeare"),
        *compression_plan.of_smollm(AGAIN, again.path),
    ]


def _kept_of(study: Trainings, shape: str) -> tuple[str, tuple[int, ...], Key]:
    """The models of a shape that a study keeps: their name, seeds, and where their results stand."""
    return study.keep_as.format(shape=shape, seed="{seed}"), study.seeds, (*study.path(shape, 0)[:-1], "{seed}")


def _after(made_by: Sequence[Trainings], study: Trainings) -> Trainings:
    """A study that begins with the models of others, of the same seeds."""
    after = tuple(
        (other.path(shape, seed), other.keep_as.format(shape=shape, seed=seed))
        for other in made_by
        for shape in other.keep
        for seed in other.seeds
    )
    return dataclasses.replace(study, after=after)


def _branches(scale: Scale, *, steps: int, together: int) -> list[Study]:
    """Branch-Train-MiX: one model for every domain becomes an expert; against copies of one that read as much."""
    kept = frozenset((AS_IT_IS,))
    alone = [
        Trainings("branches", scale, {AS_IT_IS: AS_IT_IS}, steps, 250, SEEDS, mixture=name, keep=kept,
                  keep_as=f"{name}-s{{seed}}", within=name)
        for name in DOMAINS
    ]  # fmt: skip
    one = Trainings("branches", scale, {AS_IT_IS: AS_IT_IS}, len(DOMAINS) * steps, 250, SEEDS, keep=kept,
                    keep_as="together-s{seed}", within="together")  # fmt: skip
    return [
        *alone,
        one,
        _after(
            alone,
            Trainings("mixed branches", scale, {BRANCHES: BRANCHES}, together, 250, SEEDS, keep=frozenset((BRANCHES,))),
        ),
        _after([one], Trainings("mixed branches", scale, {THREE: THREE}, together, 250, SEEDS, "together-s{seed}")),
    ]
