"""The figures of compressed layers as columns of a table."""

from collections.abc import Callable, Sequence

from moe_jax.compression.job.report import LayerReport
from moe_jax.core.formatting import show_bytes

WORDS = ("base", "choice")
"""Columns of words; they are often the same in all layers."""


def layer_columns(layers: Sequence[LayerReport]) -> dict[str, list[str]]:
    """Returns a text for every layer, by title. Columns without any figure are left out; `-` means no figure.

    A line break in a title is where it may be divided.
    """
    columns = {title: [show(layer) for layer in layers] for title, show in _COLUMNS.items()}
    return {
        title: ["-" if text is None else text for text in texts]
        for title, texts in columns.items()
        if any(text is not None for text in texts)
    }


def _number(name: str, form: str) -> Callable[[LayerReport], str | None]:
    """Returns a function that formats a figure; None if it has no meaning."""
    return lambda layer: None if getattr(layer, name) is None else format(getattr(layer, name), form)


def _rounds(layer: LayerReport) -> str | None:
    if layer.rounds is None:
        return None
    return str(layer.rounds) if layer.converged else f"{layer.rounds}, not converged"


_COLUMNS: dict[str, Callable[[LayerReport], str | None]] = {
    "layer": _number("layer", ""),
    "base": _number("base", ""),
    "choice": _number("choice", ""),
    "cosine\nto base": _number("cosine_mean", ".4f"),
    "least": _number("cosine_min", ".4f"),
    "objective": _number("objective", ".4g"),
    "rounds": _rounds,
    "error": _number("relative_error", ".4f"),
    "of\noutputs": _number("output_error", ".4f"),
    "predicted\nKL": _number("predicted_divergence", ".5f"),
    "of the\ndelta": _number("delta_error", ".4f"),
    "per\nneuron": _number("error_per_neuron", ".4g"),
    "seconds": _number("seconds", ".1f"),
    "bytes": lambda layer: show_bytes(layer.bytes_after),
    "kept": lambda layer: f"{layer.bytes_after / layer.bytes_before:.1%}",
}
