"""Shared by the methods that make fewer, or narrower, full experts."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError
from moe_jax.models import BankConfig, MoEConfig


def check_full(layers: Iterable[SourceLayer]) -> None:
    """Raises `InputError` if the user wants the universal FFN to become one of the experts."""
    for layer in layers:
        if layer.num_experts > layer.moe.bank_experts:
            raise InputError("--extended does not go with this method: it makes full experts, which share nothing")


def full_target(layer: SourceLayer, **changes: Any) -> MoEConfig:
    """The layer with full experts; a universal FFN stands beside them, as wide as it is.

    Args:
      layer: as it is.
      **changes: fields of `MoEConfig`.
    """
    moe = layer.moe
    target = dataclasses.replace(moe, bank=BankConfig(), extended=False, universal_dim=None, **changes)
    if moe.universal == "none" or moe.universal_ffn == target.expert:
        return target
    return dataclasses.replace(target, universal_dim=moe.universal_ffn.dim)


def routed_kernels(layer: SourceLayer, name: str) -> Iterator[np.ndarray]:
    """One matrix of all experts that the router chooses from, float32[in, out].

    Raises:
      InputError: if a weight is not finite.
    """
    for expert, kernel in enumerate(layer.kernels(name)):
        if expert == layer.moe.routed_experts:
            return  # the universal FFN
        yield kernel.astype(np.float32, copy=False)


def routed_biases(layer: SourceLayer, name: str) -> np.ndarray | None:
    """Biases of these experts, [E, out]; None where the FFN has none."""
    biases = layer.biases(name)
    return None if biases is None else biases[: layer.moe.routed_experts]


def write_universal(layer: SourceLayer, write: Write) -> None:
    """Writes the universal FFN on its own, if it is the last expert of the bank."""
    if not layer.moe.extended:
        return
    for name in layer.shapes:
        *_, last = layer.kernels(name)
        write(f"universal/{name}/kernel", layer.stored(name, last))
        biases = layer.biases(name)
        if biases is not None:
            write(f"universal/{name}/bias", biases[-1])


def neurons_of(name: str, kernel: np.ndarray, neurons: Sequence[int] | np.ndarray) -> np.ndarray:
    """Some neurons of a kernel [in, out], in the order given."""
    return kernel[neurons] if name == "down" else kernel[:, neurons]
