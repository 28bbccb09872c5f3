"""The compute capability of the NVIDIA GPU that a program is traced for."""

import re

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Capability = tuple[int, int]
"""The compute capability of a GPU, such as (9, 0)."""

# Triton has tensor-core products of these dtypes from Ampere on.
TRITON_FROM: Capability = (8, 0)
_TRITON_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

# Compute capabilities by device name, from NVIDIA's list of CUDA GPUs; the first key that a name contains counts. A
# mesh of GPUs that are not there knows only their name.
_BY_NAME: tuple[tuple[str, Capability], ...] = (
    (r"\bGH200\b|\bH(20|100|200|800)\b", (9, 0)),
    (r"\bG?B300\b", (10, 3)),
    (r"\bG?B(100|200)\b", (10, 0)),
    (r"\bBlackwell\b|\bRTX 50\d\d\b", (12, 0)),
    (r"\bL4\b|\bL40S?\b|\bRTX 40\d\d\b|\bAda\b", (8, 9)),
    (r"\bA(2|10|10G|16|40)\b|\bRTX A\d+\b|\bRTX 30\d\d\b", (8, 6)),
    (r"\bA(30|100|800)\b", (8, 0)),
    (r"\bT4\b|\bRTX 20\d\d\b", (7, 5)),
    (r"\bV100\b", (7, 0)),
)


def compute_capability() -> Capability | None:
    """Returns the compute capability of the GPU that the program is traced for; None: unknown.

    The GPU is that of the mesh in use, else JAX's default device, if that is one. If it is unknown, the program may be
    for any GPU, and nothing may be assumed.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return capability_of(device.device_kind) if device.platform in ("gpu", "cuda") else None
    if jax.default_backend() != "gpu":
        return None
    return _parse(getattr(jax.local_devices()[0], "compute_capability", None))


def capability_of(name: str) -> Capability | None:
    """Returns the compute capability of a GPU by its name, such as `NVIDIA H100 80GB HBM3`; None: unknown."""
    for pattern, capability in _BY_NAME:
        if re.search(pattern, name):
            return capability
    # A GPU that is present can be asked itself.
    if jax.default_backend() == "gpu" and jax.local_devices()[0].device_kind == name:
        return _parse(getattr(jax.local_devices()[0], "compute_capability", None))
    return None


def triton_fits(dtype: DTypeLike, capability: Capability | None) -> bool:
    """Whether Triton's kernels can be used for a dtype; a GPU that is unknown is assumed to be new enough."""
    return jnp.dtype(dtype) in _TRITON_DTYPES and (capability is None or capability >= TRITON_FROM)


def _parse(text: str | None) -> Capability | None:
    found = re.fullmatch(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None
