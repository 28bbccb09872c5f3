"""Which models are trained, and how."""

import dataclasses

UPCYCLED, RANDOM = "upcycled", "random"
# Of the held-out text: half of it, several hundred models are scored.
SCORED_TOKENS = 32_768
# Of the training text, for methods that ask what routers do.
CALIBRATION_TOKENS = 16_384


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the models of a row come from; there is one for every seed.

    Attributes:
      start: `upcycled`: vanilla copies of stories260K's FFNs. `random`: new weights everywhere.
      num_experts: E, in every layer.
    """

    start: str
    num_experts: int

    @property
    def name(self) -> str:
        return f"{self.start}-e{self.num_experts}"


ORIGINS = {origin.name: origin for origin in (Origin(UPCYCLED, 8), Origin(RANDOM, 8), Origin(RANDOM, 4))}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Equal for every model; results of other settings are not mixed.

    The learning rate is what `ders_quality.py` found best. Without weight decay: it would shrink the experts that are
    used least.
    """

    upcycled_steps: int = 600
    random_steps: int = 800
    batch_size: int = 8
    seq_len: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.0
    top_k: int = 2
    balance_coef: float = 0.01
    held_out_share: float = 0.1
