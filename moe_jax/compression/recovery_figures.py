"""Figures of a recovery: how much was won back after a compression."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """Figures of the recovery after a compression: the small parameters of the model were tuned against the original.

    Attributes:
      steps: that were done.
      best_step: the step with the lowest divergence, whose parameters the model has; 0: no step won anything, and the
        model is as it was compressed.
      seconds: that it took.
      parameters: number of those that were tuned.
      tokens: number of tokens of the text learnt from, repetitions included.
      held_out_tokens: number of tokens of the text, others than those, that the following are means over.
      divergence_before, divergence_after: KL(original || compressed) of the predictions, nats per token.
      loss_before, loss_after: cross-entropy, nats per token.
    """

    steps: int
    best_step: int
    seconds: float
    parameters: int
    tokens: int
    held_out_tokens: int
    divergence_before: float
    divergence_after: float
    loss_before: float
    loss_after: float

    def in_words(self) -> str:
        """Returns a line that says what was done and won."""
        done = f"{self.steps:,} steps, {self.parameters:,} parameters, {self.seconds / 60:.1f} min"
        if not self.best_step:
            return (
                f"recovery: nothing was won ({done}): KL from the original stays {self.divergence_before:.5f}, and the "
                "model as it was compressed"
            )
        return (
            f"recovery: KL from the original {self.divergence_before:.5f} -> {self.divergence_after:.5f}, loss "
            f"{self.loss_before:.4f} -> {self.loss_after:.4f}, on {self.held_out_tokens:,} held-out tokens; step "
            f"{self.best_step:,} of {done}"
        )
