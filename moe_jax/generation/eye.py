"""Features of pictures in prompts: the image encoder of a decoder looks once at a picture that comes again."""

import collections
import threading
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from moe_jax.generation.pictures import PictureFeatures
from moe_jax.nn import Decoder

KEPT_BYTES = 256 << 20
"""Bytes of features that are kept; of CLIP-L/336 in float32, those of 113 pictures."""


class SeenPicture(NamedTuple):
    """A picture as a prompt has it: a digest of its file's bytes (`feature_cache.digest_of`), and its pixels."""

    digest: bytes
    pixels: UInt8[np.ndarray, "H W 3"]


def room_for(pictures: int) -> int:
    """Returns for how many pictures a program is that reads a prompt with so many: few programs serve all numbers."""
    return 1 << (pictures - 1).bit_length() if pictures else 0


class Eye:
    """Looks at pictures one by one, so that what it makes of one never depends on others. Threads may share it.

    Attributes:
      looked: number of pictures that the encoder looked at.
    """

    def __init__(self, decoder: Decoder, *, kept_bytes: int = KEPT_BYTES):
        """Compiles nothing yet; `decoder` is a model that sees."""
        graphdef, self._state = nnx.split(decoder.vision)
        self._program = jax.jit(lambda state, pixels: nnx.merge(graphdef, state).features(pixels)[0, 0])
        self._kept: collections.OrderedDict[bytes, Float[Array, "n w"]] = collections.OrderedDict()
        self._bytes, self._most_bytes = 0, kept_bytes
        self._guard = threading.Lock()
        self.looked = 0

    def see(self, pictures: Sequence[SeenPicture], slots: Sequence[int]) -> PictureFeatures | None:
        """Returns the pictures of one prompt as features, in the dtype of activations; None: it has none.

        Args:
          pictures: in the order of their slots.
          slots: of the prompt's tokens.
        """
        if not pictures:
            return None
        features = [self._features_of(picture) for picture in pictures]
        features += [jnp.zeros_like(features[0])] * (room_for(len(pictures)) - len(features))
        return PictureFeatures(jnp.stack(features)[None], [list(slots)])

    def _features_of(self, picture: SeenPicture) -> Float[Array, "n w"]:
        with self._guard:
            found = self._kept.get(picture.digest)
            if found is not None:
                self._kept.move_to_end(picture.digest)
                return found
        made = self._program(self._state, jnp.asarray(picture.pixels)[None, None])
        with self._guard:
            self.looked += 1
            if picture.digest not in self._kept:
                self._kept[picture.digest] = made
                self._bytes += made.nbytes
            while self._bytes > self._most_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= oldest.nbytes
        return made
