"""Reads a model as if it were stored in another dtype."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.core.errors import InputError, check_member
from moe_jax.core.finite import DoesNotFit, cast
from moe_jax.model_io.loading import may_be_cast
from moe_jax.model_io.model_source import ModelSource


class CastSource:
    """A `ModelSource` that casts another one's leaves when they are read. Stored sizes are those of the other one."""

    def __init__(self, source: ModelSource, dtype: str):
        """Reads no weights yet.

        Args:
          source: the model.
          dtype: `float32`, `bfloat16` or `float16`, for all floating-point leaves that may be cast.

        Raises:
          InputError: for another dtype.
        """
        check_member("dtype", dtype, ("float32", "bfloat16", "float16"))
        self.config = dataclasses.replace(source.config, dtype=dtype)
        self._source = source
        self._dtype = jnp.dtype(dtype)

    @property
    def path(self) -> Path:
        """The path of the model."""
        return self._source.path

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """The tokenizer files of the model."""
        return self._source.tokenizer_files

    @property
    def lineage(self) -> Sequence[dict[str, Any]]:
        """The lineage of the model."""
        return self._source.lineage

    @property
    def base(self) -> ModelSource | None:
        """The base of the model, not cast; None if it has none."""
        return self._source.base

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns leaf path -> shape and the dtype that `read` returns."""
        return {
            path: jax.ShapeDtypeStruct(spec.shape, self._dtype) if may_be_cast(path, spec.dtype) else spec
            for path, spec in self._source.specs().items()
        }

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf and casts it.

        Raises:
          InputError: if it cannot be read, or is too large for the dtype.
        """
        leaf = self._source.read(path)
        if not may_be_cast(path, leaf.dtype):
            return leaf
        try:
            return cast(path, leaf, self._dtype)
        except DoesNotFit as error:
            raise InputError(f"{error}; choose another --dtype") from None

    def stored_bytes(self, path: str) -> int:
        """Returns the number of bytes of one leaf as the model stores it."""
        return self._source.stored_bytes(path)

    def fingerprint(self) -> str:
        """Returns the fingerprint of the model as it is stored."""
        return self._source.fingerprint()
