"""Lines of `inspect` about adapters: their layers, their form, and their base."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from moe_jax.core.formatting import index_set

if TYPE_CHECKING:
    import jax

    from moe_jax.model_io.model_source import ModelSource
    from moe_jax.models import LayerConfig, ModelConfig


def adapter_lines(config: "ModelConfig") -> list[str]:
    """Returns one line for each kind of adapter, LoRA or NF4 kernel, with the layers that have it."""
    layers_of: dict[str, list[int]] = {}
    for index, layer in enumerate(config.layers):
        for line in _of_layer(layer):
            layers_of.setdefault(line, []).append(index)
    return [line.format(layers=f"layers/{index_set(layers)}") for line, layers in layers_of.items()]


def described_base(
    base: "ModelSource", own: "Mapping[str, jax.ShapeDtypeStruct]", sizes: dict[str, int]
) -> dict[str, Any]:
    """Returns the base of a tuned model, and the leaves that are stored without it, as JSON.

    Args:
      base: the base.
      own: shapes and dtypes of the leaves that the tuned model stores itself.
      sizes: numbers of parameters of the tuned model, by leaf path.
    """
    return {
        "base": {"path": str(base.path), "fingerprint": base.fingerprint()},
        "own": {
            "leaves": list(own),
            "parameters": sum(sizes[path] for path in own),
            "bytes": sum(spec.size * spec.dtype.itemsize for spec in own.values()),
        },
    }


def in_words(value: Any) -> str:
    """Returns a config as `(name value, ...)`; anything else as a string."""
    if not isinstance(value, dict):
        return str(value)
    return "(" + ", ".join(f"{name} {one}" for name, one in value.items()) + ")"


def _of_layer(layer: "LayerConfig") -> Iterator[str]:
    from moe_jax.models import MoEConfig

    mlp = layer.mlp
    moe = mlp if isinstance(mlp, MoEConfig) else None
    modules = {"attention": layer.attention, "the FFN" if moe is None else "the experts": moe.expert if moe else mlp}
    for name, module in modules.items():
        if module.nf4:
            yield f"NF4 kernels in {name} of {{layers}}"
        if module.lora is not None:
            yield f"LoRA beside {name} of {{layers}}: {_lora(module.lora)}"
    if moe is not None and moe.router_lora is not None:
        yield f"LoRA beside the router of {{layers}}: {_lora(moe.router_lora)}"
    if moe is not None and moe.perft is not None:
        perft = dataclasses.asdict(moe.perft)
        chosen = "" if moe.perft.top_k is None else f", top {moe.perft.top_k}, gate {moe.perft.gate}"
        adapter = in_words(perft["adapter"])
        yield f"PERFT in {{layers}}: {moe.perft.variant}, {moe.perft.num_experts} adapters{chosen}, adapter {adapter}"


def _lora(lora: Any) -> str:
    return f"{', '.join(lora.targets)}; rank {lora.rank}, scale {lora.scale:g}, dropout {lora.dropout:g}"
