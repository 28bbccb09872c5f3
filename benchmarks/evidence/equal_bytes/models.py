"""The models of the comparison, and what they are calibrated on."""

import dataclasses
import os
import shutil
from functools import lru_cache, partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from evidence.studies.compression_job import kept_model
from evidence.studies.corpus import tokenizer_file
from evidence.studies.jobs import Place
from evidence.studies.models import Leaves
from evidence.studies.scales import SCALES
from evidence.studies.texts import DOMAINS, read_text
from moe_jax.compression import Calibration
from moe_jax.compression.calibration.recording import (
    KEY_FILE,
    read_layer,
    read_sensitivities,
    record,
    sample_windows,
    write_sensitivities,
)
from moe_jax.compression.calibration.sensitivities import has_gradients, measure_sensitivities, record_gradients
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.distributed.sharding import make_mesh
from moe_jax.model_io.in_memory import LeavesInMemory, ModelInMemory

PERMUTED = ", permuted"
SAMPLES_PER_DOMAIN = 32
_CHARACTERS = 400_000
# Windows by which it is measured how much depends on each layer.
_MEASURED = 9


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kept model, perhaps with the neurons of its experts in another order each.

    Attributes:
      scale: name of one of `SCALES`.
      model: name under which the model is kept.
      permuted: whether every expert's neurons are permuted at random, which changes nothing that the model says.
    """

    scale: str
    model: str
    permuted: bool = False

    @property
    def label(self) -> str:
        """Key in the results."""
        return self.model + PERMUTED if self.permuted else self.model


@lru_cache(maxsize=2)
def opened(place: Place, subject: Subject) -> tuple[ModelInMemory, Leaves]:
    """A model in bfloat16, and the same numbers in float32."""
    _, whole = kept_model(place, subject.scale, subject.model)
    leaves = dict(whole.leaves)
    if subject.permuted:
        random = np.random.default_rng(0)
        for layer in whole.config.moe_layers:
            moe = whole.config.moe(layer)
            orders = np.stack([random.permutation(moe.expert.dim) for _ in range(moe.bank_experts)])
            for name in moe.expert.shapes(whole.config.d_model):
                path = f"layers/{layer}/mlp/experts/{name}/kernel"
                index = orders[:, :, None] if name == "down" else orders[:, None, :]
                leaves[path] = np.take_along_axis(leaves[path], index, 1 if name == "down" else 2)
    whole = Leaves(whole.config, leaves)
    config = dataclasses.replace(whole.config, dtype="bfloat16")
    halves = {path: _bfloat16(leaf) for path, leaf in leaves.items()}
    return ModelInMemory(config, LeavesInMemory(halves)), whole


def _bfloat16(leaf: np.ndarray) -> np.ndarray:
    return leaf.astype(ml_dtypes.bfloat16) if leaf.dtype == np.float32 else leaf


@lru_cache(maxsize=4)
def calibration(
    place: Place, subject: Subject, draw: int, *, gradients: bool = False, sensitivities: bool = False
) -> Calibration:
    """Of windows from the texts to train on, the same number of every domain.

    Args:
      place: of the model and its texts, and where calibrations are kept.
      subject: the model.
      draw: of the windows.
      gradients: whether tokens count by the gradients of the loss.
      sensitivities: whether it is also measured how much depends on each layer, which takes longer than all the rest.
    """
    scale, (source, _) = SCALES[subject.scale], opened(place, subject)
    tokenizer = Tokenizer(tokenizer_file(place, scale), source.config)
    windows = [
        sample_windows(
            tokenizer.encode(read_text(name, place.data).train[:_CHARACTERS]),
            seq_len=scale.seq_len,
            samples=SAMPLES_PER_DOMAIN,
            seed=draw,
        )
        for name in DOMAINS
    ]
    folder = place.work / "calibrations" / subject.scale / subject.label / str(draw)
    drawn = np.concatenate(windows)
    if not (folder / KEY_FILE).exists():
        _record(source, drawn, folder)
    if gradients and not has_gradients(folder, source.config.moe_layers):
        _record_gradients(source, drawn, folder)
    recorded = partial(read_layer, folder, gradients=gradients)
    layers = {i: recorded(i) for i in source.config.moe_layers}
    known = read_sensitivities(folder, gradients=gradients)
    if known is None and sensitivities:
        # Windows of all domains.
        spread = drawn[np.linspace(0, len(drawn) - 1, _MEASURED).astype(int)]
        known = measure_sensitivities(source, spread, recorded, mesh=_one_device())
        write_sensitivities(folder, known, gradients=gradients)
    if known is not None:
        layers = {i: layer._replace(sensitivities=known[i]) for i, layer in layers.items()}
    # Only the lineage of a model that is thrown away names a file: it needs one that is there.
    return Calibration((folder / KEY_FILE,), layers)


def _record(source: ModelInMemory, windows: np.ndarray, folder: Path) -> None:
    """Two workers may do it: what they write is the same, and the second is thrown away."""
    own = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(own, ignore_errors=True)
    record(source, windows, own, {"windows": list(windows.shape)}, mesh=_one_device())
    try:
        own.rename(folder)
    except OSError:
        shutil.rmtree(own)


def _record_gradients(source: ModelInMemory, windows: np.ndarray, folder: Path) -> None:
    """Likewise."""
    own = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    record_gradients(source, windows, own, mesh=_one_device())
    for file in own.iterdir():
        file.replace(folder / file.name)
    own.rmdir()


def _one_device() -> Mesh:
    return make_mesh({}, jax.devices()[:1])
