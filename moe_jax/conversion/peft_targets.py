"""The tensors that the Hugging Face PEFT library can adapt in a model, and its packing of LoRA's factors.

PEFT adds LoRA to linear modules, and since 0.17 to parameters that are no module's `weight`, which it calls
`target_parameters`: in Transformers 5, the two tensors that hold all experts of a layer, and the router. Their names
are those that Transformers has in memory, where experts are fused.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moe_jax.conversion.families import family_named
from moe_jax.conversion.hf.hf_format import exported_config
from moe_jax.conversion.table import FUSED, apply_table
from moe_jax.core.errors import InputError
from moe_jax.experts.shapes import LoRAConfig
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.tuned_base import base_config
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig

WEIGHT = ".weight"


class Part(NamedTuple):
    """A kernel with LoRA inside a tensor.

    Attributes:
      path: of the kernel's module, such as `layers/0/mlp/experts/gate`.
      lora: its LoRA.
      first, last: range of the tensor's outputs that belong to it.
    """

    path: str
    lora: LoRAConfig
    first: int
    last: int


class Target(NamedTuple):
    """A tensor of Transformers with LoRA.

    Attributes:
      tensor: its name, such as `model.layers.0.mlp.experts.gate_up_proj`.
      template: the same with `{i}` for the layer.
      outputs: rows of the tensor, or of one expert of it.
      experts: E of a tensor that holds the experts of a layer; None: it holds one matrix.
      is_parameter: whether PEFT must be given a parameter, and not a linear module.
      parts: its kernels that have LoRA.
    """

    tensor: str
    template: str
    outputs: int
    experts: int | None
    is_parameter: bool
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """PEFT's name of the target."""
        return self.tensor if self.is_parameter else self.tensor.removesuffix(WEIGHT)

    @property
    def rank(self) -> int:
        """Rank of all parts together: each has columns of its own."""
        return sum(part.lora.rank for part in self.parts)

    @property
    def scale(self) -> float:
        """Factor of the product of the two factors of LoRA, that of the first part."""
        return self.parts[0].lora.scale


def problems_of_peft(config: ModelConfig) -> list[str]:
    """Returns why PEFT's format cannot hold the adapters of a model, one phrase per kind; none if it can."""
    moes = [config.moe(i) for i in config.moe_layers]
    kinds = {
        "adapter experts (PESC)": [not moe.bank.form.has_expert_kernels for moe in moes],
        "PERFT experts": [moe.perft is not None for moe in moes],
    }
    problems = [f"{kind} have no place in it" for kind, found in kinds.items() if any(found)]
    if problems:
        return problems
    if not any(_loras(layer) for layer in config.layers):
        return ["it has no LoRA"]
    try:
        targets_of(config)
    except InputError as error:
        return [str(error)]
    return []


def targets_of(config: ModelConfig) -> list[Target]:
    """Returns the tensors with LoRA of a model, by their names in the checkpoint that `export` would write of its base.

    Raises:
      InputError: if no Hugging Face format can hold the base, or a kernel has no tensor there that PEFT could adapt.
    """
    base = exported_config(base_config(config), replicate_dense=True)
    family = family_named(base.family)
    specs = leaf_specs(base)
    mapped = apply_table(
        family.table_of(base), specs, base.num_layers, FUSED, family.name, num_encoder_layers=base.num_encoder_layers
    )
    stored = leaf_specs(config)
    found: dict[str, list[Part]] = {}
    about: dict[str, tuple[str, int, int | None]] = {}
    for i, layer in enumerate(config.layers):
        for name, lora in _loras(layer).items():
            path = f"layers/{i}/{name}"
            if f"{path}/lora/a" not in stored:
                raise InputError(f"the LoRA of {path} is beside a base that experts share; merge the adapter instead")
            pieces = mapped.pieces.get(f"{path}/kernel", [])
            tensors = {piece.tensor for piece in pieces}
            if len(tensors) != 1:
                raise InputError(f"in the format of {family.name!r}, {path} is no tensor that PEFT can adapt")
            if family.own_code and pieces[0].expert is not None:
                raise InputError(f"{family.name!r} comes with code of its own, in which experts are not one parameter")
            piece, shape = pieces[0], mapped.tensors[pieces[0].tensor]
            experts = shape[0] if piece.expert is not None else None
            *_, outputs, inputs = shape
            first = piece.offset // inputs
            if _kernel_shape(config, path) != tuple(specs[f"{path}/kernel"].shape) or not piece.transpose:
                raise InputError(
                    f"in the format of {family.name!r}, {path} has another shape; merge the adapter instead"
                )
            about[piece.tensor] = (piece.template, outputs, experts)
            found.setdefault(piece.tensor, []).append(Part(path, lora, first, first + piece.shape[0]))
    return [
        Target(tensor, *about[tensor], is_parameter=_is_parameter(tensor, parts), parts=tuple(parts))
        for tensor, parts in found.items()
    ]


def factors(target: Target, read: Callable[[str], np.ndarray], *, rank: int, scale: float) -> tuple[np.ndarray, ...]:
    """Returns `lora_A.weight` [rank (E), in] and `lora_B.weight` [out, rank (E)] as PEFT packs them.

    Each part has columns and outputs of its own; a rank that is larger than theirs is filled up with zeros. For
    experts, rows of A are ordered by expert first, and columns of B by column first.

    Args:
      target: the tensor with LoRA.
      read: leaf path -> leaf.
      rank: of the result, at least that of the target.
      scale: by which PEFT will multiply the product; a part with another scale gets the quotient into its B.
    """
    one = [_with_experts(read(f"{part.path}/lora/a")) for part in target.parts]
    count, inputs, dtype = one[0].shape[0], one[0].shape[1], one[0].dtype
    a = np.zeros((count, rank, inputs), dtype)
    b = np.zeros((count, target.outputs, rank), dtype)
    begin = 0
    for part, of_part in zip(target.parts, one, strict=True):
        end = begin + part.lora.rank
        other = _with_experts(read(f"{part.path}/lora/b"))
        a[:, begin:end] = of_part.swapaxes(1, 2)
        b[:, part.first : part.last, begin:end] = other.swapaxes(1, 2) * dtype.type(part.lora.scale / scale)
        begin = end
    return a.reshape(-1, inputs), np.ascontiguousarray(b.transpose(1, 2, 0)).reshape(target.outputs, -1)


def tensor_names(targets: Sequence[Target]) -> Iterator[tuple[Target, str]]:
    """Yields every target with the name under which PEFT stores its factors, without `.lora_A.weight`.

    For two parameters of one module, PEFT wraps the module twice: the one that is registered first is inside.
    """
    inner: dict[str, int] = {}
    for target in targets:
        if target.is_parameter:
            module = target.tensor.rpartition(".")[0]
            inner[module] = inner.get(module, 0) + 1
    for target in targets:
        if not target.is_parameter:
            yield target, target.name
            continue
        module = target.tensor.rpartition(".")[0]
        inner[module] -= 1
        yield target, module + ".base_layer" * inner[module]


def _loras(layer: LayerConfig) -> dict[str, LoRAConfig]:
    """Returns the LoRA of every kernel of a layer, by the path of its module inside the layer."""
    found = {}
    if layer.attention.lora is not None:
        found |= {f"attention/{name}": layer.attention.lora for name in layer.attention.lora.targets}
    mlp = layer.mlp
    if isinstance(mlp, MoEConfig):
        if mlp.router_lora is not None:
            found["mlp/router"] = mlp.router_lora
        if mlp.expert.lora is not None:
            found |= {f"mlp/experts/{name}": mlp.expert.lora for name in _in_order(mlp.expert.lora.targets)}
    elif mlp.lora is not None:
        found |= {f"mlp/{name}": mlp.lora for name in mlp.lora.targets}
    return found


def _in_order(names: Iterable[str]) -> list[str]:
    """Returns kernels of an FFN in the order that Transformers registers them: `gate_up_proj` before `down_proj`."""
    return sorted(names, key=lambda name: (name == "down", name))


def _is_parameter(tensor: str, parts: Sequence[Part]) -> bool:
    """Whether a tensor is no module's weight: routers are no linear modules, fused experts no modules."""
    return not tensor.endswith(WEIGHT) or parts[0].path.endswith("/router")


def _kernel_shape(config: ModelConfig, path: str) -> tuple[int, ...]:
    """Returns the shape of the kernel that the factors are for, which may be stored as NF4."""
    a, b = (leaf_specs(config)[f"{path}/lora/{name}"].shape for name in "ab")
    return (*a[:-1], b[-1])


def _with_experts(factor: np.ndarray) -> np.ndarray:
    return factor if factor.ndim == 3 else factor[None]
