"""Shared by families with Mamba-2 in some layers and attention in others: the tensors of these."""

from dataclasses import replace

from moe_jax.conversion.table import Row, Table, linear, norm
from moe_jax.models import Mamba2Config, ModelConfig

_OURS = "layers/{i}/attention"
_ONLY = f"{_OURS}/log_rate"


def mamba_rows(theirs: str) -> Table:
    """Returns the rows of Mamba-2, the module `theirs` of a layer."""
    joined = {
        part: tuple(f"{_OURS}/{name}/{part}" for name in ("gate", "v", "k", "q", "decay"))
        for part in ("kernel", "bias")
    }
    rows = (
        Row(f"{theirs}.in_proj.weight", joined["kernel"], transpose=True),
        Row(f"{theirs}.in_proj.bias", joined["bias"]),
        Row(_convolution(theirs), tuple(f"{_OURS}/{name}_conv" for name in Mamba2Config.convolved), transpose=True),
        Row(f"{theirs}.conv1d.bias", tuple(f"{_OURS}/{name}_conv_bias" for name in Mamba2Config.convolved)),
        Row(f"{theirs}.dt_bias", f"{_OURS}/rate_bias"),
        Row(f"{theirs}.A_log", f"{_OURS}/log_rate"),
        Row(f"{theirs}.D", f"{_OURS}/skip"),
        *norm(f"{theirs}.norm", f"{_OURS}/norm"),
        *linear(f"{theirs}.out_proj", f"{_OURS}/o"),
    )
    return tuple(replace(row, beside=_ONLY) for row in rows)


def beside_mamba(rows: Table) -> Table:
    """Returns rows of attention for layers that have no Mamba-2."""
    return tuple(replace(row, without=_ONLY) for row in rows if isinstance(row, Row))


def mamba_shapes(config: ModelConfig, theirs: str) -> dict[str, tuple[int, ...]]:
    """Returns the shape of the convolutions' kernels, which have a further axis, for `Family.shapes`.

    It is empty if all layers have attention.
    """
    mixers = [layer.attention for layer in config.layers if isinstance(layer.attention, Mamba2Config)]
    if not mixers:
        return {}
    window, channels, _ = mixers[0].carried
    return {_convolution(theirs): (sum(channels), 1, window + 1)}


def _convolution(theirs: str) -> str:
    return f"{theirs}.conv1d.weight"
