"""Parts of a model that sees which its own weights lack: the image encoder, and the projector of a first stage."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from moe_jax.conversion.tensors import TensorEntry
from moe_jax.core.errors import InputError, shown
from moe_jax.models import VisionConfig

# What the first stage of MoE-LLaVA leaves, which trains nothing else.
PROJECTOR_FILE = "mm_projector.bin"
_PROJECTOR = ".mm_projector."


class Elsewhere(NamedTuple):
    """Places of parts that a checkpoint of a model that sees does not hold; they take the place of any that it does.

    Attributes:
      vision_tower: the directory of an image encoder, or of a whole CLIP or SigLIP; None: there is none.
      projector: a PyTorch file with a projector's tensors, named as in the checkpoint; None: there is none.
    """

    vision_tower: Path | None = None
    projector: Path | None = None

    def check(self, *, takes_parts: bool) -> None:
        """Raises `InputError` if a place is named for a format that has all parts in it, or nothing is there."""
        if not takes_parts and self != NOWHERE:
            raise InputError(
                "--vision-tower and --projector go with the formats of MoE-LLaVA, whose configs only name their image "
                "encoder, and the model_type here is another"
            )
        if self.vision_tower is not None and not (self.vision_tower / "config.json").is_file():
            raise InputError(f"--vision-tower {self.vision_tower}: it has no config.json; expected an image encoder's")
        if self.projector is not None and not self.projector.is_file():
            raise InputError(f"--projector {self.projector}: no such file; expected a {PROJECTOR_FILE}")


NOWHERE = Elsewhere()


def with_parts(
    own: Mapping[str, TensorEntry],
    tower: Mapping[str, TensorEntry],
    projector: Mapping[str, TensorEntry],
    vision: VisionConfig,
    tower_prefix: str,
) -> dict[str, TensorEntry]:
    """Returns the tensors of a checkpoint, with those of a tower and of a projector in place of its own.

    All are named as in the table of the model; empty ones replace nothing.

    Raises:
      InputError: if no tensor of the tower, or of the projector, is there; says how to give them.
    """
    if tower:
        own = {name: entry for name, entry in own.items() if not name.startswith(tower_prefix)}
    if projector:
        own = {name: entry for name, entry in own.items() if _PROJECTOR not in name}
    found = {**own, **projector, **tower}
    if not any(name.startswith(tower_prefix) for name in found):
        name = shown(vision.foreign.get("mm_image_tower"))
        raise InputError(
            f"it holds no tensors of its image encoder, {name}; give a directory that does: moe-jax convert "
            "--vision-tower DIR"
        )
    if "linear" in vision.projector and not has_projector(found):
        raise InputError(
            f"it holds no projector; put {PROJECTOR_FILE}, of the first stage of training, beside the weights, or name "
            "it: moe-jax convert --projector FILE"
        )
    return found


def has_projector(names: Iterable[str]) -> bool:
    """Whether there are tensors of a projector among those of such names."""
    return any(_PROJECTOR in name for name in names)


def of_projector(tensors: Mapping[str, TensorEntry], file: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of a projector among those of a file; raises `InputError` if there are none."""
    found = {name: entry for name, entry in tensors.items() if _PROJECTOR in name}
    if not found:
        raise InputError(f"{file} holds no tensors of a projector, such as model.mm_projector.0.weight")
    return found
