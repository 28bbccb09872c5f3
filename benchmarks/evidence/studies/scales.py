"""The sizes of models that claims are tested at."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scale:
    """What is equal for all runs of one size of model.

    Attributes:
      name: key in the results.
      seq_len, batch_size: tokens of a row, and rows of a step.
      warmup_steps: at the beginning of every run; the rate then falls by a cosine, to nothing at the end.
      scored_tokens: of the selection text and of the test text of every domain, each.
      vocab_size: of the tokenizer that is made for this scale; None: the model brings one.
    """

    name: str
    seq_len: int
    batch_size: int
    warmup_steps: int
    scored_tokens: int
    vocab_size: int | None = None


# stories260K: 5 layers of d 64, of which upcycling makes every second an MoE.
STORIES = Scale("stories260K", seq_len=128, batch_size=8, warmup_steps=20, scored_tokens=16_384)
# A Llama of our own: 6 layers of d 256.
MIDDLE = Scale("middle", seq_len=128, batch_size=8, warmup_steps=20, scored_tokens=16_384, vocab_size=2048)
SMOLLM = Scale("SmolLM2-135M", seq_len=128, batch_size=2, warmup_steps=5, scored_tokens=4_096)
SCALES = {scale.name: scale for scale in (STORIES, MIDDLE, SMOLLM)}
# Of the runs that are reported; rates are chosen with another one.
SEEDS = (0, 1, 2)
PILOT_SEEDS = (10, 11, 12)
RATE_SEED = 1000
