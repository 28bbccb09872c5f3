"""Bytes of compressed experts in every form in which they can be stored, from a config alone (methods.md 5 and 8).

The bank itself is built by `eval_shape` and its leaves are counted: no weights are needed, and no formula can disagree
with the disk.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.compression.coding.schemes import LowRank, Pruned, Quantized, Scheme, check_keep
from moe_jax.core.counting import count_bytes
from moe_jax.core.errors import InputError, check_member
from moe_jax.distributed.sharding import path_name
from moe_jax.experts import BankConfig, BaseCodes, FFNConfig, make_bank
from moe_jax.experts.forms import MixtureOfBases
from moe_jax.experts.forms.fresh import shapes_of
from moe_jax.experts.forms.mixture_of_bases import BasisActivation
from moe_jax.experts.forms.positions import ENCODINGS, POSITION_LEAVES
from moe_jax.experts.forms.quantized import BITS, TABLE_BITS
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import ModelConfig, MoEConfig

INT32_BYTES, INT64_BYTES = 4, 8
# What Zarr keeps of an array beside its bytes, at most.
LEAF_OVERHEAD = 256
SPARSE = ("csr16", "csr32", "bitmap", "coo", "coo64")
LOW_RANK = ("svd", "svd-separate")
_BITS = {f"quantized:{bits}": bits for bits in BITS}
QUANTIZED = tuple(_BITS)
RESIDUAL_FORMS = {"up": SPARSE, "svd": LOW_RANK, "quantized": QUANTIZED}
"""Forms by the kind of residual."""

FULL, NARROWED, MERGED = "full", "narrowed", "merged"
"""Forms of full kernels: as many as there are experts, with fewer neurons, and fewer of them."""
REMOVED = "removed"
"""Fewer experts as they are, and a router of fewer outputs."""
BASES = "bases"
"""Factors of gate and up, one of them mixed of shared bases; `keep` is the share of these kernels."""
FORMS = (*SPARSE, *LOW_RANK, *QUANTIZED, BASES, FULL, NARROWED, MERGED, REMOVED)

COMPARISONS = ("csr32", "coo64")
"""Forms that are never written: CSR has int16 columns where these are enough, and int64 is what public code stores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Of the experts of one layer.

    Attributes:
      values: kernels, entries, factors, or codes and scales.
      places: where sparse entries are: rows, columns, bits; and which expert an output of the router stands for.
      row_pointers: ends of the rows of CSR.
      centre: the base that the experts share.
      biases: of the experts; they are not compressed.
    """

    values: int = 0
    places: int = 0
    row_pointers: int = 0
    centre: int = 0
    biases: int = 0

    @property
    def total(self) -> int:
        """Of all of them."""
        return self.values + self.places + self.row_pointers + self.centre + self.biases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A model with its experts in one form.

    Attributes:
      form: its name.
      layer: bytes of the first layer that is compressed.
      expert_bytes: of all layers that are.
      model_bytes: of the model.
      share: `expert_bytes` by what the same experts take as they are.
      bits_per_weight: of the experts, everything included.
      written: whether a model can be written in the form, or it is shown to compare with.
    """

    form: str
    layer: LayerBytes
    expert_bytes: int
    model_bytes: int
    share: float
    bits_per_weight: float
    written: bool


def stored_bytes(
    config: ModelConfig,
    layers: Sequence[int],
    forms: Iterable[str],
    *,
    keep: float,
    base: Literal["shared", "none"] = "shared",
    base_codes: BaseCodes | None = None,
    value_bits: int | None = None,
    codes: Mapping[str, Any] = MappingProxyType({}),
    dtype: str | None = None,
) -> list[Stored]:
    """Counts a model in several forms.

    Args:
      config: of the model.
      layers: the MoE layers that are compressed.
      forms: of `FORMS`.
      keep: share, in (0, 1], of the entries of an expert that sparse forms keep; low-rank ones have as many numbers.
        Of neurons or experts, where these are fewer.
      base: whether the experts share a centre.
      base_codes: of the centre, in forms that have one; None: it has the dtype of the model.
      value_bits: of the entries of sparse forms; None: they have the dtype of the model.
      codes: options of `schemes.Quantized` beside the bits. A table only where codes of so many bits have one.
      dtype: of all parameters; None: that of the config.

    Raises:
      InputError: if a form is not known, or does not go with the options or the shape of the experts.
    """
    check_keep(keep)
    kind = jnp.dtype(dtype or config.dtype)
    specs = leaf_specs(config, dtype)
    prefixes = tuple(f"layers/{i}/mlp/experts/" for i in layers)
    before = count_bytes(spec for path, spec in specs.items() if path.startswith(prefixes))
    whole = count_bytes(specs.values())
    weights = sum(_weights(config.moe(i), config.d_model) for i in layers)
    counted = []
    for form in forms:
        of_shape: dict[MoEConfig, LayerBytes] = {}  # layers are mostly alike, and are counted once
        outputs = 0
        for i in layers:
            moe = config.moe(i)
            if moe not in of_shape:
                target = form_layer(
                    form,
                    moe,
                    config.d_model,
                    keep=keep,
                    base=base,
                    base_codes=base_codes,
                    value_bits=value_bits,
                    codes=codes,
                )
                of_shape[moe] = _compared(form, target, layer_bytes(target, config.d_model, kind))
            if form == REMOVED:
                left = max(1, round(keep * moe.num_experts))
                outputs += _router_bytes(specs, i) * (moe.num_experts - left) // moe.num_experts
        experts = sum(of_shape[config.moe(i)].total for i in layers)
        counted.append(
            Stored(
                form=form,
                layer=of_shape[config.moe(layers[0])],
                expert_bytes=experts,
                model_bytes=whole - before + experts - outputs,
                share=experts / before,
                bits_per_weight=8 * experts / weights,
                written=form not in COMPARISONS,
            )
        )
    return counted


def form_layer(
    form: str,
    moe: MoEConfig,
    d_model: int,
    *,
    keep: float,
    base: Literal["shared", "none"] = "shared",
    base_codes: BaseCodes | None = None,
    value_bits: int | None = None,
    codes: Mapping[str, Any] = MappingProxyType({}),
) -> MoEConfig:
    """A layer with its experts in a form; of a form that is never written, the one that it is compared with.

    Args:
      form, keep, base, base_codes, value_bits, codes: see `stored_bytes`.
      moe: the layer as it is.
      d_model: width of the model.

    Raises:
      InputError: see `stored_bytes`.
    """
    check_member("form of storage", form, FORMS)
    expert = moe.expert
    if value_bits is not None and form not in SPARSE:
        raise InputError(f"value_bits={value_bits} does not go with {form}: only {', '.join(SPARSE)} have entries")
    if form == NARROWED:
        universal_dim = moe.universal_ffn.dim if moe.universal_beside else None
        narrow = dataclasses.replace(expert, dim=max(1, round(keep * expert.dim)))
        return dataclasses.replace(moe, expert=narrow, bank=BankConfig(), universal_dim=universal_dim)
    if form == MERGED:
        return dataclasses.replace(moe, bank=BankConfig(), merged_experts=max(1, round(keep * moe.num_experts)))
    if form == REMOVED:
        return dataclasses.replace(moe, num_experts=max(1, round(keep * moe.num_experts)))
    if form in SPARSE:
        bank = _bank(Pruned(keep=keep, bits=value_bits, design="separate"), moe, d_model, base)
        encoding = form if form in ENCODINGS else "csr"
        bank = dataclasses.replace(bank, form=dataclasses.replace(bank.form, encoding=encoding))
    elif form in LOW_RANK:
        design = "concat" if form == "svd" else "separate"
        bank = _bank(LowRank(keep=keep, design=design), moe, d_model, base)
    elif form in QUANTIZED:
        bits = _BITS[form]
        table = codes.get("table", False) and bits in TABLE_BITS
        bank = _bank(Quantized(bits=bits, **{**codes, "table": table}), moe, d_model, base)
    elif form == BASES:
        bank = mobe_bank(expert, d_model, moe.bank_experts, keep=keep)
    else:
        bank = BankConfig()
    if bank.has_base:
        bank = dataclasses.replace(bank, base_codes=base_codes)
    bank.check_fits(expert, d_model)
    return dataclasses.replace(moe, bank=bank)


def disk_bytes(moe: MoEConfig, d_model: int, dtype: jnp.dtype) -> int:
    """What the experts of a layer take on the disk, Zarr's metadata included; see `layer_bytes`."""
    return layer_bytes(moe, d_model, dtype).total + LEAF_OVERHEAD * len(_bank_leaves(moe, d_model, dtype))


def disk_bytes_by_matrix(moe: MoEConfig, d_model: int, dtype: jnp.dtype) -> dict[str, int]:
    """`disk_bytes` of the leaves of every matrix; for experts whose matrices have no leaves in common."""
    sizes = dict.fromkeys(moe.expert.matrices, 0)
    for path, leaf in _bank_leaves(moe, d_model, dtype).items():
        (name,) = set(path.split("/")) & sizes.keys()
        sizes[name] += count_bytes([leaf]) + LEAF_OVERHEAD
    return sizes


def layer_bytes(moe: MoEConfig, d_model: int, dtype: jnp.dtype) -> LayerBytes:
    """What the experts of a layer take.

    Args:
      moe: the layer.
      d_model: width of the model.
      dtype: of its parameters.
    """
    sizes = dict.fromkeys((field.name for field in dataclasses.fields(LayerBytes)), 0)
    for path, leaf in _bank_leaves(moe, d_model, dtype).items():
        sizes[_part(path)] += count_bytes([leaf])
    if moe.merged_experts is not None:  # which of them each output of the router stands for
        sizes["places"] += moe.num_experts * INT32_BYTES
    return LayerBytes(**sizes)


# By title, fields of `LayerBytes`.
_PARTS = {
    "values": ("values",),
    "their positions": ("places", "row_pointers"),
    "the shared centre": ("centre",),
    "biases": ("biases",),
}


def bytes_by_part(config: ModelConfig, layers: Iterable[int]) -> dict[str, int]:
    """What the experts of some layers take, by part in words, in the dtype of the config where there are no codes."""
    parts = [layer_bytes(config.moe(layer), config.d_model, jnp.dtype(config.dtype)) for layer in layers]
    return {title: sum(getattr(part, name) for part in parts for name in names) for title, names in _PARTS.items()}


@lru_cache(maxsize=4096)
def _bank_leaves(moe: MoEConfig, d_model: int, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of all leaves of the bank of a layer, by path."""
    bank = shapes_of(lambda rngs: make_bank(moe.bank, moe.expert, moe.bank_experts, d_model, rngs=rngs, dtype=dtype))
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(bank))}


def _router_bytes(specs: Mapping[str, jax.ShapeDtypeStruct], layer: int) -> int:
    """Of what the router of a layer has for every expert."""
    names = ("kernel", "selection_bias")
    paths = (f"layers/{layer}/mlp/router/{name}" for name in names)
    return count_bytes(specs[path] for path in paths if path in specs)


def mobe_bank(
    expert: FFNConfig,
    d_model: int,
    num_experts: int,
    *,
    keep: float | None = None,
    rank: int | None = None,
    bases: int | None = None,
    activation: BasisActivation = "silu",
) -> BankConfig:
    """The bank of MoBE: gate and up take the share `keep` of their numbers, or have the rank.

    Args:
      expert: the shape of an expert.
      d_model: d.
      num_experts: E.
      keep: share; None: the rank is given.
      rank: None: min(d, f), which with `keep` is the most.
      bases: m; None: a quarter of E, and at least one.
      activation: of mixed bases.
    """
    short, long = sorted((d_model, expert.dim))
    bases = max(1, num_experts // 4) if bases is None else bases
    if keep is not None:
        numbers = num_experts * (keep * short * long - bases)
        rank = max(1, min(short, int(numbers / (num_experts * short + bases * long))))
    form = MixtureOfBases(rank=short if rank is None else rank, bases=bases, activation=activation)
    return BankConfig(form, base="none")


def _bank(scheme: Scheme, moe: MoEConfig, d_model: int, base: Literal["shared", "none"]) -> BankConfig:
    return scheme.bank(moe.expert, d_model, base=base)


def _compared(form: str, moe: MoEConfig, counted: LayerBytes) -> LayerBytes:
    """The same layer in a form that is never written."""
    if form not in COMPARISONS:
        return counted
    sparse: Any = moe.bank.form
    entries = moe.bank_experts * sum(sparse.entries)
    if form == "csr32":
        return dataclasses.replace(counted, places=entries * INT32_BYTES)
    return dataclasses.replace(counted, places=entries * 2 * INT64_BYTES, row_pointers=0)


def _part(path: str) -> str:
    """The field of `LayerBytes` that a leaf of a bank counts for."""
    leaf = path.rpartition("/")[2]
    if path.startswith("base/"):
        return "centre"
    if leaf in ("bias", "row_ends"):
        return "biases" if leaf == "bias" else "row_pointers"
    return "places" if any(leaf in leaves for leaves in POSITION_LEAVES.values()) else "values"


def _weights(moe: MoEConfig, d_model: int) -> int:
    """Weights of the experts of a layer, as full kernels, biases included."""
    shapes = moe.expert.shapes(d_model).values()
    biases = sum(shape[1] for shape in shapes) if moe.expert.bias else 0
    return moe.bank_experts * (sum(map(math.prod, shapes)) + biases)
