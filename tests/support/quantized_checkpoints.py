"""Small quantised checkpoints, written tensor by tensor, and beside each the one that its reference makes of it."""

import copy
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file

from moe_jax.conversion import convert
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.hf_checkpoints import CONFIGS

QUIET = Console(quiet=True)
Stored = Mapping[str, torch.Tensor]
Quantise = Callable[[str, torch.Tensor], tuple[Stored, torch.Tensor]]
"""`quantise(name, weight)`: the tensors stored of a weight, by name, and what the reference decodes them to."""


def plain_checkpoint(folder: pathlib.Path, name: str, **changed: Any) -> pathlib.Path:
    """Saves a small random model of a family as Transformers does, one tensor for every expert; returns the folder."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(CONFIGS[name]) | changed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    model.save_pretrained(folder, save_original_format=True)
    return folder


def is_quantised(name: str, weight: torch.Tensor) -> bool:
    """Whether a tensor is the weight of a linear layer other than the head and routers, as writers choose them."""
    left = ("embed_tokens", "lm_head", ".gate.weight", "shared_expert_gate")
    return weight.ndim == 2 and name.endswith(".weight") and not any(part in name for part in left)


def write_quantised(
    plain: pathlib.Path,
    folder: pathlib.Path,
    quantise: Quantise,
    settings: Mapping[str, Any],
    chosen: Callable[[str, torch.Tensor], bool] = is_quantised,
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes a checkpoint with the chosen weights quantised, and one with what the reference decodes them to.

    Returns the folders of both; the first has `settings` as its `quantization_config`.
    """
    quantised, decoded = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if chosen(name, weight):
            stored, values = quantise(name, weight)
            quantised |= {key: value.contiguous() for key, value in stored.items()}
            decoded[name] = values.to(torch.float32).contiguous()
        else:
            quantised[name] = decoded[name] = weight
    config = json.loads((plain / "config.json").read_text())
    for where, tensors, more in (
        (folder / "quantised", quantised, {"quantization_config": dict(settings)}),
        (folder / "decoded", decoded, {}),
    ):
        where.mkdir(parents=True)
        save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})
        (where / "config.json").write_text(json.dumps(config | more))
    return folder / "quantised", folder / "decoded"


def leaves_of(checkpoint: pathlib.Path, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Converts a checkpoint, and returns the leaves of the model by path."""
    convert(checkpoint, folder, console=QUIET)
    model = ModelDirectory(folder)
    return {path: model.read(path) for path in model.specs()}


def assert_reads_as(quantised: pathlib.Path, decoded: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Asserts that a quantised checkpoint is converted to the very numbers of the decoded one; returns the model."""
    ours, theirs = leaves_of(quantised, folder / "ours"), leaves_of(decoded, folder / "theirs")
    assert ours.keys() == theirs.keys()
    for path, values in theirs.items():
        assert ours[path].dtype == values.dtype, path
        np.testing.assert_array_equal(ours[path], values, err_msg=path)
    return folder / "ours"
