"""The part of the plan that compresses: which of the kept models, how, and what they are asked."""

from evidence.results import Key
from evidence.studies.compressions import Compressions, DeltaSizes
from evidence.studies.jobs import Study
from evidence.studies.probes import Probes
from evidence.studies.scales import MIDDLE, SMOLLM, STORIES
from evidence.studies.variants import (
    BASELINE,
    COMPRESSION,
    DENSE_BASE,
    DERS,
    MAIN_KEEP,
    MEAN_BASE,
    NOISE,
    PERMUTED_PAIRS,
    PLAIN,
    REFITTED,
    RESMOE,
    VARIANTS,
    chosen,
)

# Forms of stored experts that differ from each other: of each, the model as it is served is scored too.
_SERVED = frozenset((f"quantised deltas {DENSE_BASE}", "plain quantisation", REFITTED, "M-SMoE"))
# Chosen so that a compressed SmolLM2-MoE is made and asked in some three minutes of one core, all of them in an hour of
# two.
_SMOLLM = {
    "plain quantisation": (4, 3, 2),
    f"quantised deltas {DENSE_BASE}": (2, 4, 1),
    REFITTED: (0.25, 0.1),
    "UP": (0.25,),
    "SVD": (0.25,),
    "SP": (0.25,),
    "M-SMoE": (0.25, 0.5),
    "ResMoE quantized": (2,),
    "ResMoE SVD": (0.25,),
    "MEO": (0.25,),
    "Git Re-Basin": (0.25,),
    "MLP Fusion": (0.25,),
    f"quantised deltas {MEAN_BASE}": (2, 1),
    f"no deltas {DENSE_BASE}": (0,),
    # Others are measured by `DeltaSizes`.
    f"random drops {DENSE_BASE}": (0.9,),
    f"largest kept {DENSE_BASE}": (0.9,),
    f"{REFITTED}, no refit": (0.25,),
    "average + UP": (0.25,),
}
# Not among them is a budget of 4.125 bits per weight: of 4 experts, a centre that is no code takes 4.


def of_stories(model: str, seeds: tuple[int, ...], after: Key) -> list[Study]:
    """Every variant at every value.

    Args:
      model: name under which models are kept, `{seed}` standing for the seed.
      seeds: of the models.
      after: where the result stands of the job that keeps the model of a seed; likewise.
    """
    variants = chosen(DERS, PLAIN, RESMOE, BASELINE)
    return [
        Compressions(COMPRESSION, STORIES, model, seeds, after, variants, serve=frozenset(VARIANTS)),
        DeltaSizes(NOISE, STORIES, model, seeds, after),
    ]


def of_permuted(model: str, seeds: tuple[int, ...], after: Key) -> list[Study]:
    """A centre of matched experts, and of unmatched ones, when neurons lie alike and when not; arguments as above."""
    variants = {name: (MAIN_KEEP,) for pair in PERMUTED_PAIRS for name in pair}
    return [Compressions(COMPRESSION, STORIES, model, seeds, after, variants)]


def of_middle(model: str, seeds: tuple[int, ...], after: Key, *, upcycled: bool) -> list[Study]:
    """The first values of every variant; of models from random weights, without what is taken from a dense one."""
    variants = chosen(DERS, dense=upcycled, most=4) | chosen(PLAIN, RESMOE, BASELINE, most=3)
    compressions = Compressions(COMPRESSION, MIDDLE, model, seeds, after, variants, serve=_SERVED)
    return [compressions, *([DeltaSizes(NOISE, MIDDLE, model, seeds, after)] if upcycled else [])]


def of_smollm(model: str, after: Key) -> list[Study]:
    """Of the one model that there is."""
    probes = Probes(questions=64, prompts=8)
    return [
        Compressions(
            COMPRESSION, SMOLLM, model, (0,), after, _SMOLLM, probes=probes, serve=_SERVED, matched=False, windows=True
        ),
        DeltaSizes(NOISE, SMOLLM, model, (0,), after, factors=(1.0, 2.0)),
    ]
