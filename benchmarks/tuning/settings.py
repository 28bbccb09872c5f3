"""What is equal for every run, and the learning rates that are tried."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """Results of other settings are not mixed.

    Dropout is the published one: 0.1 for PESC, 0.05 for PERFT and the LoRA beside an MoE. Without weight decay: it
    would pull adapters towards nothing, and trained bases as well.

    Attributes:
      base_steps, base_batch_size, base_rate: of the MoEs that are tuned afterwards.
      upcycled_steps, tuned_steps: of a run of the first and of the second part.
      num_experts, top_k: of every MoE, PESC's included.
      rest_rank: of the LoRA beside PESC's adapters, with the published alpha of 16.
      held_out_tokens, validation_tokens: scored; the learning rate is chosen on the latter.
      rate_seed: of the runs that learning rates are chosen with; no other run has it.
    """

    seq_len: int = 128
    batch_size: int = 4
    warmup_steps: int = 10
    base_steps: int = 400
    base_batch_size: int = 8
    base_rate: float = 3e-3
    upcycled_steps: int = 200
    tuned_steps: int = 100
    num_experts: int = 8
    top_k: int = 2
    balance_coef: float = 0.01
    rest_rank: int = 8
    held_out_tokens: int = 16_384
    validation_tokens: int = 8_192
    rate_seed: int = 1000


# `--quick`: whether everything works, not how well.
QUICK = Settings(
    seq_len=32,
    batch_size=2,
    warmup_steps=1,
    base_steps=2,
    base_batch_size=2,
    upcycled_steps=2,
    tuned_steps=2,
    num_experts=4,
    held_out_tokens=256,
    validation_tokens=128,
)

# Of models whose own weights are trained, and of adapters, which begin at nothing and need more.
FULL_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
ADAPTER_RATES = (3e-3, 1e-2, 3e-2, 1e-1)
