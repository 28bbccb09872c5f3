"""What is trained and compressed."""

import dataclasses

DENSE = "dense"
VANILLA = "vanilla"
FROZEN = ", frozen base"

BASES = ("dense model", "mean of experts")
DROPS = ("0.2", "0.4", "0.6", "0.8", "0.9", "0.95", "0.99")
BITS = ("8", "4", "2", "1")
NO_DELTAS = "no deltas"
# The name of a compression, and its values as they stand in the results.
METHODS = {NO_DELTAS: ("",), "drop": DROPS, "drop, largest kept": DROPS, "bits": BITS}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A row of the training table.

    Attributes:
      delta: as `moe-jax upcycle --delta` takes it; None: the dense model, which is not upcycled.
      freeze_base: the experts' shared base is not trained (attention and embedding always are).
    """

    delta: str | None = None
    freeze_base: bool = False


KINDS = {
    DENSE: Kind(),
    VANILLA: Kind("full"),
    "DeRS-LM r=1": Kind("low-rank:1"),
    "DeRS-LM r=4": Kind("low-rank:4"),
    "DeRS-LM r=16": Kind("low-rank:16"),
    "DeRS-SM 0.9": Kind("sparse:0.9"),
    "DeRS-SM 0.99": Kind("sparse:0.99"),
    "DeRS-LM r=1" + FROZEN: Kind("low-rank:1", True),
    "DeRS-LM r=4" + FROZEN: Kind("low-rank:4", True),
    "DeRS-LM r=16" + FROZEN: Kind("low-rank:16", True),
    "DeRS-SM 0.9" + FROZEN: Kind("sparse:0.9", True),
    "DeRS-SM 0.99" + FROZEN: Kind("sparse:0.99", True),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Equal for every run; results of other settings are not mixed.

    The learning rate is the best of 1e-3, 3e-3 and 1e-2 for the dense model, for vanilla and for DeRS-LM alike (one
    seed). There is no weight decay: it would pull deltas towards the base, and full experts towards nothing.
    """

    steps: int = 200
    batch_size: int = 8
    seq_len: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.0
    num_experts: int = 4
    top_k: int = 2
    every: int = 1
    balance_coef: float = 0.01
    held_out_share: float = 0.1
