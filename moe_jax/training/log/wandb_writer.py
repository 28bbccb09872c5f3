"""Metrics for Weights & Biases, if a recipe asks for them (extra `wandb`)."""

import importlib
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from moe_jax.core.errors import InputError
from moe_jax.files.storage_path import as_path

_RUN_ID = "wandb_id"


def import_wandb() -> Any:
    """Imports the library, which nothing else imports.

    Raises:
      InputError: if it is not installed.
    """
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise InputError("log.wandb needs Weights & Biases: pip install 'moe-jax[wandb]'") from None


class WandbWriter:
    """Logs scalars to a run of Weights & Biases; a continued run of ours continues that run.

    Files, those of an offline run included, are in `RUN/wandb`, or for a run in a bucket in `wandb` of the current
    directory; `wandb sync` sends them later.

    Args:
      run_dir: of the run; `wandb_id` in it names the run of Weights & Biases.
      mode: `online` or `offline`.
      project: of Weights & Biases.
      config: the recipe, flat.
    """

    def __init__(self, run_dir: Path, *, mode: Literal["online", "offline"], project: str, config: Mapping[str, Any]):
        wandb, file = import_wandb(), run_dir / _RUN_ID
        if not file.is_file():
            as_path(file).replace_content(secrets.token_hex(4).encode())
        self._run = wandb.init(
            project=project,
            name=run_dir.resolve().name,
            id=file.read_text(encoding="utf-8").strip(),
            resume="allow",
            mode=mode,
            dir=str(as_path(run_dir).on_disk or Path.cwd()),
            config=dict(config),
        )
        # Our steps, and not those of Weights & Biases, are the axis: steps that an interrupted run wrote beyond its
        # last checkpoint come a second time, which its own steps do not allow.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        """Logs the scalars of a step, by tag."""
        self._run.log({"step": step, **dict(scalars)})

    def close(self) -> None:
        """Ends the run of Weights & Biases; everything is sent, or in its files."""
        self._run.finish()
