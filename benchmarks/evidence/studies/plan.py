"""The plan: what is trained, tuned and compressed at which scale, how long and how often."""

from evidence.studies.jobs import Place, Study
from evidence.studies.long_job import train_middle, train_smollm_moe
from evidence.studies.scales import MIDDLE, SMOLLM, STORIES
from evidence.studies.trainings import Kept, Trainings

SEEDS = (0, 1, 2)
AS_IT_IS, VANILLA, EVERY_LAYER, FOUR = "as it is", "vanilla", "vanilla, every layer", "vanilla, 4 experts"

# Of the learning rates of these shapes, others take theirs: they are of the same family, and about as large.
_UPCYCLED = {
    AS_IT_IS: AS_IT_IS,
    VANILLA: VANILLA,
    "LM r=4": "LM r=4",
    "LM r=16": "LM r=16",
    "SM 0.9": "SM 0.9",
    "LM r=1": "LM r=4",
    "LM r=64": "LM r=16",
    "SM 0.99": "SM 0.9",
    "SM 0.999": "SM 0.9",
    "LM r=4, universal": "LM r=4",
    "LM r=4, extended": "LM r=4",
    "LM r=4, frozen base": "LM r=4, frozen base",
    "LM r=16, frozen base": "LM r=16, frozen base",
    "SM 0.9, frozen base": "SM 0.9, frozen base",
    "LM r=1, frozen base": "LM r=4, frozen base",
    "LM r=64, frozen base": "LM r=16, frozen base",
    "SM 0.99, frozen base": "SM 0.9, frozen base",
    "SM 0.999, frozen base": "SM 0.9, frozen base",
    "noise 0.01": VANILLA,
    "noise 0.1": VANILLA,
    "drop 0.5": VANILLA,
    "granularity 2": VANILLA,
}
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


def studies(place: Place) -> list[Study]:
    """All of the plan that can be done with what there is, in the order in which it is worked on."""
    bases = Trainings("bases", STORIES, {EVERY_LAYER: EVERY_LAYER}, 500, 250, SEEDS, mixture="earlier",
                      keep=frozenset((EVERY_LAYER,)))  # fmt: skip
    middle_dense = Kept(MIDDLE.name, "dense", train_middle, {})
    small = [
        Trainings("pilot", STORIES, {AS_IT_IS: AS_IT_IS, VANILLA: VANILLA}, 250, 250, SEEDS),
        Trainings("upcycling", STORIES, _UPCYCLED, 1000, 250, SEEDS, keep=frozenset((VANILLA,))),
        bases,
        Trainings("perft", STORIES, _perft((8, 2, 32)), 150, 150, SEEDS, f"{EVERY_LAYER}-s{{seed}}",
                  after=tuple(bases.path(EVERY_LAYER, seed) for seed in SEEDS)),
        Trainings("pesc", STORIES, _PESC, 300, 150, SEEDS),
        middle_dense,
    ]  # fmt: skip
    if place.smollm is None:
        return small
    moe = Kept(SMOLLM.name, FOUR, train_smollm_moe, {"shape": FOUR})
    return [*small, moe]
