"""Held-out loss of models."""

import numpy as np
from flax import nnx

from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder
from moe_jax.train.evaluation import Evaluator

_BATCH = 16


class Scorer:
    """Scores the same text with many models; one program for all models of the same config that follow each other."""

    def __init__(self, held_out: np.ndarray, seq_len: int):
        """Takes Int32[n], the text, and the length of the windows it is cut into."""
        self._held_out = held_out
        self._seq_len = seq_len
        self._compiled: tuple[ModelConfig, Evaluator] | None = None

    def __call__(self, model: Decoder) -> float:
        graphdef, state = nnx.split(model)
        if self._compiled is None or self._compiled[0] != model.config:
            self._compiled = model.config, self.evaluator(graphdef)
        return self._compiled[1](state).nll

    def evaluator(self, graphdef: nnx.GraphDef) -> Evaluator:
        """What scores the text with the parameters of one model."""
        return Evaluator(graphdef, self._held_out, seq_len=self._seq_len, batch_size=_BATCH)
