"""The Hugging Face format in which a model is exported, the first of its family's that gives the same logits.

A model can often be expressed in several ways that compute the same. So a model is first converted to the form of a
format: full experts of equal width, universal FFNs beside them. Then its config is written in the format and read back,
which shows whether the format can hold it. The leaves in that form are a view: experts are materialised one at a time
while they are written, never a whole layer at once.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
from rich.console import Console

from moe_jax.conversion.config_keys import code_beside, is_harmless
from moe_jax.conversion.families import Family, family_named
from moe_jax.conversion.formats.coded_parts import stored_codes
from moe_jax.conversion.formats.encoders import Codes
from moe_jax.conversion.hf_config import inexpressible, write_hf_config
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.core.formatting import count_bytes, show_bytes
from moe_jax.experts.forms import ffn_matrices
from moe_jax.experts.on_host import expert_kernels
from moe_jax.functional.routing.gates import GATES
from moe_jax.model_io.in_memory import ModelInMemory
from moe_jax.model_io.loading import FURTHER, check_leaves, leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.models.linear_codes import EMBEDDING, HEAD_KERNEL

# A shared expert of zeros may be as narrow as possible.
NARROWEST = 1


def exported_config(
    config: ModelConfig, *, replicate_dense: bool, all_moe: Callable[[str], bool] = lambda family: False
) -> ModelConfig:
    """Returns the config of a model after merging, in the family whose format can hold it.

    A dense model is unchanged. In a model with MoE layers, deltas are merged into full experts. If its family has no
    MoE layers the model moves to the first of the family's `moe_formats` that can hold it; if that has no dense layers,
    or has them in other places, they become MoEs of equal experts, if `replicate_dense`. Merged experts are repeated,
    one for each output of the router. Narrower experts, and universal FFNs, are padded to the largest width in any
    layer with zero neurons, which add nothing because act(0) = 0. `all_moe` says of which families the format is
    written without dense layers beside MoEs, even if it could have them.

    Raises:
      InputError: if no format holds the model.
    """
    if not config.moe_layers:
        write_hf_config(config)
        return config
    family = family_named(config.family)
    if family.holds_experts:
        held = _in_form_of(config, family, replicate_dense=replicate_dense, only_moe=all_moe(family.name))
        write_hf_config(held)
        return held
    refusals: list[tuple[bool, int, str, list[str]]] = []  # whether its form is impossible, how much, the format, why
    for name, only_moe in itertools.product(family.moe_formats, (False, True) if replicate_dense else (False,)):
        try:
            held = _in_form_of(
                config, family_named(name), replicate_dense=replicate_dense, only_moe=only_moe or all_moe(name)
            )
        except InputError as error:
            refusals.append((True, 1, name, [str(error)]))
            continue
        lost = inexpressible(held)
        if not lost:
            return held
        refusals.append((False, len(lost), name, lost))
    nearest = ""
    if refusals:
        *_, name, why = min(refusals, key=lambda refusal: refusal[:2])
        more = f" (and {len(why) - 1} more)" if len(why) > 1 else ""
        nearest = f". The nearest is that of {name!r}: {why[0]}{more}"
    raise InputError(
        f"a {family.name!r} model with such MoE layers has no Hugging Face format that would give the same logits; "
        f"keep it as a model directory{nearest}"
    )


def _in_form_of(config: ModelConfig, family: Family, *, replicate_dense: bool, only_moe: bool) -> ModelConfig:
    """Converts the model to the form of a format, in which dense layers become MoEs if it has none, or with `only_moe`.

    Raises `InputError` if they cannot, or must not.
    """
    moes = [config.moe(i) for i in config.moe_layers]
    holds_dense = family.holds_dense_layers and not only_moe
    with_ffn = [i for i, layer in enumerate(config.layers) if "mlp" in layer.branches]
    dense = [] if holds_dense else [i for i in with_ffn if i not in config.moe_layers]
    if dense and not replicate_dense:
        raise InputError(
            f"the format of {family.name!r} needs an MoE in every layer, but {len(dense)} of {config.num_layers} "
            "are dense; --dense-layers replicate stores such a layer as equal experts, with the same logits"
        )
    width = max([*(moe.expert.dim for moe in moes), *(config.ffn(i).dim for i in dense)])
    beside = [moe.universal_ffn.dim for moe in moes if moe.universal != "none"]
    layers = [_expressed(layer, family, width, max(beside, default=NARROWEST)) for layer in config.layers]
    held = replace(config, family=family.name, layers=tuple(layers))
    if family.name != config.family:
        # Other keys of the old format could mean something in the new one; `auto_map` names code.
        kept = {key: value for key, value in config.foreign.items() if is_harmless(key, value) and key != "auto_map"}
        held = replace(held, foreign=kept)
    if held.vision is not None and family.sees not in (None, held.vision.family):
        held = replace(held, vision=replace(held.vision, family=family.sees, placeholder=None, foreign={}))
    return replace(held, layers=_replicated(held, dense, width, alone=not beside)) if dense else held


def _expressed(layer: LayerConfig, family: Family, width: int, beside: int) -> LayerConfig:
    """Returns a layer with full experts and a universal FFN beside them, as Hugging Face formats can express it."""
    mlp = layer.mlp
    if not isinstance(mlp, MoEConfig):
        return layer
    universal = "one" if mlp.universal == "med" else mlp.universal
    if family.universal is not None and universal in ("none", "one"):
        # An FFN of zeros; or one of half the output, as the sigmoid of 0 is 1/2.
        universal = family.universal
    weighting = "softmax_topk" if mlp.weighting == "top1" else mlp.weighting
    said = replace(
        mlp,
        expert=replace(mlp.expert, dim=width),
        gate=mlp.gate if universal == "coder" else weighting,
        bank=BankConfig(),
        merged_experts=None,
        universal=universal,
        universal_dim=None if universal == "none" else beside,
        extended=False,
    )
    return replace(layer, mlp=said)


def _replicated(config: ModelConfig, dense: Sequence[int], width: int, *, alone: bool) -> tuple[LayerConfig, ...]:
    """Returns the layers with MoEs of equal experts in place of dense FFNs.

    If experts are `alone` in the model, a universal FFN that the format has beside them is of zeros in every layer.
    """
    layers, like = list(config.layers), config.moe(config.moe_layers[0])
    if not GATES[like.gate].weights_sum_to_one or like.gate_scale != 1.0 or not (alone or like.universal == "none"):
        raise InputError(
            f"the format of {config.family!r} needs an MoE in every layer, and dense layers can be equal experts only "
            "where weights sum to 1"
        )
    for i in dense:
        if replace(config.ffn(i), dim=width) != like.expert:
            raise InputError(
                f"layer {i} has the FFN {config.ffn(i)}, the experts are {like.expert}; "
                f"the format of {config.family!r} has one kind for both"
            )
        layers[i] = replace(layers[i], mlp=like)
    return tuple(layers)


def print_changes(before: ModelConfig, after: ModelConfig, sizes: Mapping[str, int], console: Console) -> None:
    """Prints how the format changes the model: its family, and experts that are added, padded, repeated or replicated.

    It also says which code must be put beside a model that Transformers has no class for.

    The config `after` is from `exported_config`, and `sizes` are the bytes of its leaves as they are written.
    """
    if before.family != after.family:
        console.print(f"an upcycled {before.family!r} model: exporting in the format of {after.family!r}")
    if family_named(after.family).sees is not None:
        console.print(
            f"note: Transformers has no class for {after.family!r}: the code of MoE-LLaVA reads it, with an "
            "image encoder or without"
        )
    elif family_named(after.family).own_code:
        own = code_beside(after.foreign) or [f"{kind}_{after.family}.py" for kind in ("modeling", "configuration")]
        console.print(
            f"note: Transformers has no class for {after.family!r}: it needs trust_remote_code=True, and next to "
            f"the weights {' and '.join(own)} of a published model",
            markup=False,
        )
    narrow = [i for i in before.moe_layers if before.moe(i).expert.dim < after.moe(i).expert.dim]
    if narrow:
        console.print(
            f"the experts of {len(narrow)} layers get neurons of zeros: the format has one width for all layers, "
            f"{after.moe(narrow[0]).expert.dim}"
        )
    merged = [i for i in before.moe_layers if before.moe(i).merged_experts is not None]
    if merged:
        console.print(
            f"the merged experts of {len(merged)} layers are written once for every output of the router, "
            f"{after.moe(merged[0]).num_experts}, which the format needs"
        )
    dense = [i for i in range(before.num_layers) if i in after.moe_layers and i not in before.moe_layers]
    if dense:
        experts = after.moe(dense[0]).num_experts
        prefix = f"layers/{dense[0]}/mlp/experts/"
        ffn = sum(size for path, size in sizes.items() if path.startswith(prefix))
        console.print(
            f"{len(dense)} dense layers become {experts} equal experts each, which the format needs: same logits, "
            f"{show_bytes(len(dense) * ffn * (experts - 1) // experts)} more (not with --dense-layers refuse)"
        )
    of_universal = Counter(what for i in before.moe_layers for what in _universal_changes(before.moe(i), after.moe(i)))
    for what, count in of_universal.items():
        console.print(f"the MoEs of {count} layers {what}")


def _universal_changes(old: MoEConfig, new: MoEConfig) -> Iterator[str]:
    if new.universal == "none":
        return
    width = new.universal_ffn.dim
    if old.universal == "none":
        yield f"get a shared expert of zeros, {width} wide, which the format needs: same logits"
        return
    if old.extended:
        yield "have their universal FFN in the bank: it is merged and stands beside it"
    if old.universal != "sigmoid" and new.universal == "sigmoid":
        yield "have a universal FFN of weight 1, which is stored with weight 1/2 and twice its output: same logits"
    if old.universal_ffn.dim < width:
        yield f"have a universal FFN with neurons of zeros: the format has one width, {width}"


class MergedModel:
    """The leaves of a source as `exported_config` describes them."""

    def __init__(self, source: ModelSource, config: ModelConfig):
        """Checks the leaves of the source; no weights are read. The config is from `exported_config`.

        Raises:
          InputError: if the source does not hold the leaves that its own config describes.
        """
        self.config = config
        self._source = source
        self._stored = source.specs()
        check_leaves(leaf_specs(source.config), self._stored, str(source.path))
        self._shapes = {path: spec.shape for path, spec in leaf_specs(config).items()}

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape of every leaf, by path, with the dtype of the leaves that it is made from."""
        return {path: jax.ShapeDtypeStruct(shape, self._dtype(path)) for path, shape in self._shapes.items()}

    def parts(self, path: str) -> Iterator[tuple[int | None, np.ndarray]]:
        """Yields (None, leaf); or for experts (e, leaf[e]) for every e, in the order of the bank.

        Shapes and dtypes are those of `specs`; deltas are added in float32.
        """
        if path.startswith(FURTHER):
            yield None, self._source.read(path)
        elif "/experts/" in path:
            yield from self._experts(path)
        elif "/mlp/universal/" in path:
            yield None, self._universal(path)
        elif path in self._stored:
            yield None, self._source.read(path)
        elif path == HEAD_KERNEL:  # of a format that has one for models that tie it, too
            yield None, self._source.read(EMBEDDING).T
        else:
            # Zeros do for a router among equal experts, and for the gate of a universal FFN of constant weight.
            yield None, self._zeros(path)

    def whole(self) -> ModelSource:
        """Returns it as a model to read from, a leaf at a time."""
        return ModelInMemory(self.config, _WholeLeaves(self), path=self._source.path)

    def codes(self, path: str) -> Iterator[tuple[int, Codes]]:
        """Yields (e, codes of leaf[e]) for every e, in the order of the bank, as they are stored.

        Raises:
          InputError: if they cannot be written so.
        """
        # A universal FFN in the bank is its last expert, and not one of the router's.
        for outputs, codes in zip(self._outputs(path), stored_codes(self._source, path), strict=False):
            for output in outputs:
                yield output, codes

    def _experts(self, path: str) -> Iterator[tuple[int, np.ndarray]]:
        outputs, shape = self._outputs(path), self._shapes[path][1:]
        mlp = self._mlp(path)
        routed = range(mlp.routed_experts if isinstance(mlp, MoEConfig) else 1)
        for expert, kernel in zip(routed, self._bank(path, routed), strict=True):
            kernel = _padded(kernel, shape)
            for output in outputs[expert]:
                yield output, kernel

    def _outputs(self, path: str) -> list[np.ndarray]:
        """Returns the router outputs that each expert of the bank stands for; for the FFN of a dense layer, all."""
        mlp, outputs = self._mlp(path), np.arange(self._shapes[path][0])
        if not isinstance(mlp, MoEConfig):
            return [outputs]
        if mlp.merged_experts is None:
            return list(outputs[:, None])
        groups = self._source.read(f"{path.partition('/experts/')[0]}/groups")
        return [np.flatnonzero(groups == group) for group in range(mlp.merged_experts)]

    def _bank(self, path: str, experts: Iterable[int]) -> Iterator[np.ndarray]:
        """Yields the kernel or bias of some experts of the bank, as stored or materialised."""
        block, _, name = path.partition("/experts/")
        mlp = self._mlp(path)
        if not isinstance(mlp, MoEConfig):
            yield self._source.read(path.replace("/experts/", "/"))
        elif path in self._stored:
            leaf = self._source.read(path)
            yield from (leaf[expert] for expert in experts)
        else:
            matrix = ffn_matrices(mlp.expert, self.config.d_model)[name.removesuffix("/kernel")]
            read, bank, dtype = self._source.read, f"{block}/experts", self._dtype(path)
            made = np.dtype(np.float32) if dtype == np.float16 else dtype  # whose range a sum may well leave
            kernels = expert_kernels(read, mlp.bank, bank, matrix, dtype=made, experts=experts)
            for expert, kernel in zip(experts, kernels, strict=True):
                yield cast(f"{path}[{expert}]", kernel, dtype)

    def _universal(self, path: str) -> np.ndarray:
        """Returns a kernel or bias of the universal FFN: beside the bank, the bank's last expert, or zeros."""
        mlp = self._mlp(path)
        if not isinstance(mlp, MoEConfig) or mlp.universal == "none":
            return self._zeros(path)
        if mlp.universal_beside:
            leaf = self._source.read(path)
        else:
            (leaf,) = self._bank(path.replace("/universal/", "/experts/"), [mlp.routed_experts])
        if mlp.universal != "sigmoid" and self.config.moe(_layer(path)).universal == "sigmoid" and "/down/" in path:
            # Its weight was 1 and will be 1/2.
            leaf = cast(path, 2 * leaf.astype(np.float32), leaf.dtype)
        return _padded(leaf, self._shapes[path])

    def _zeros(self, path: str) -> np.ndarray:
        return np.zeros(self._shapes[path], self._dtype(path))

    def _dtype(self, path: str) -> np.dtype:
        """Returns the dtype of the leaf; else of the leaf it is made from or belongs to; else of the layer's norm."""
        like = (
            path,
            path.replace("/experts/", "/"),
            path.replace("/experts/", "/experts/base/"),
            path.replace("/router/universal/", "/router/"),
            path.replace("/universal/", "/experts/"),
            path.replace("/universal/", "/experts/base/"),
            path.replace("/universal/", "/"),
            f"{path.partition('/mlp/')[0]}/attention_norm/scale",
            EMBEDDING,  # for the head
        )
        return np.dtype(next(self._stored[leaf].dtype for leaf in like if leaf in self._stored))

    def _mlp(self, path: str) -> FFNConfig | MoEConfig:
        return self._source.config.layers[_layer(path)].mlp


class _WholeLeaves:
    """The leaves of a merged model, those of experts stacked."""

    def __init__(self, model: MergedModel):
        self._model, self.specs = model, model.specs()

    def read(self, path: str) -> np.ndarray:
        parts = dict(self._model.parts(path))
        return parts[None] if None in parts else np.stack([parts[expert] for expert in range(len(parts))])

    def stored_bytes(self, path: str) -> int:
        return count_bytes([self.specs[path]])


def _layer(path: str) -> int:
    return int(path.split("/")[1])


def _padded(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pads every axis with zeros at its end."""
    if array.shape == shape:
        return array
    return np.pad(array, [(0, size - there) for size, there in zip(shape, array.shape, strict=True)])
