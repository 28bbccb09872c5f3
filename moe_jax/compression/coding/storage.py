"""Bytes of compressed experts in every layout in which they can be stored, from a config alone (methods.md 5 and 8).

The bank itself is built by `eval_shape` and its leaves are counted: no weights are needed, and no formula can disagree
with the disk.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moe_jax.core.form_options import check_keep
from moe_jax.core.formatting import count_bytes
from moe_jax.distributed.sharding import path_name
from moe_jax.experts import BankConfig, BaseCodes, make_bank
from moe_jax.experts.forms import ExpertForm, Full, ffn_matrices
from moe_jax.experts.forms.coding import Encodable, Layout, Storable, Wanted
from moe_jax.experts.shapes import FFNConfig, shapes_of
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import ModelConfig, MoEConfig
from moe_jax.models.moe_config import ROUTER_LEAVES_BY_EXPERT

INT32_BYTES = 4
# What Zarr keeps of an array beside its bytes, at most.
LEAF_OVERHEAD = 256


class Fewer(NamedTuple):
    """A layout of experts that stay full kernels, and are fewer or smaller: `layer(moe, keep)` has a share of them."""

    name: str
    layer: Callable[[MoEConfig, float], MoEConfig]


AnyLayout = Layout | Fewer


def full_experts(moe: MoEConfig, **changes: Any) -> MoEConfig:
    """The layer with full experts and other changes; a universal FFN stands beside them, as wide as it is."""
    target = dataclasses.replace(moe, bank=BankConfig(), extended=False, universal_dim=None, **changes)
    if moe.universal == "none" or moe.universal_ffn == target.expert:
        return target
    return dataclasses.replace(target, universal_dim=moe.universal_ffn.dim)


def _narrowed(moe: MoEConfig, keep: float) -> MoEConfig:
    return full_experts(moe, expert=dataclasses.replace(moe.expert, dim=max(1, round(keep * moe.expert.dim))))


def _merged(moe: MoEConfig, keep: float) -> MoEConfig:
    return full_experts(moe, merged_experts=max(1, round(keep * moe.routed_experts)))


def _removed(moe: MoEConfig, keep: float) -> MoEConfig:
    return dataclasses.replace(moe, num_experts=max(1, round(keep * moe.num_experts)))


def _joined(moe: MoEConfig, keep: float) -> MoEConfig:
    return full_experts(_removed(moe, keep))


NARROWED, MERGED, REMOVED = Fewer("narrowed", _narrowed), Fewer("merged", _merged), Fewer("removed", _removed)
"""As many full experts with fewer neurons; fewer of them; fewer as they are, and a router of fewer outputs."""
JOINED = Fewer("removed", _joined)
"""As `REMOVED`, of full experts."""
(FULL,) = Full.layouts()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """The bytes of the experts of one layer, by what they are for."""

    values: int = 0  # kernels, entries, factors, or codes and scales
    places: int = 0  # where sparse entries are: rows, columns, bits; and the expert of every output of the router
    row_pointers: int = 0  # ends of the rows of CSR
    centre: int = 0  # the base that the experts share
    biases: int = 0  # of the experts; they are not compressed

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.values + self.places + self.row_pointers + self.centre + self.biases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A model with its experts in one form."""

    form: str  # its name
    layer: LayerBytes  # bytes of the first layer that is compressed
    expert_bytes: int  # of all layers that are
    model_bytes: int  # of the model
    share: float  # `expert_bytes` by what the same experts take as they are
    bits_per_weight: float  # of the experts, everything included
    written: bool  # whether a model can be written in the form, or it is shown to compare with


def stored_bytes(
    config: ModelConfig,
    layers: Sequence[int],
    layouts: Iterable[AnyLayout],
    asked: Mapping[str, Any],
    *,
    base: Literal["shared", "none"] = "shared",
    base_codes: BaseCodes | None = None,
    dtype: str | None = None,
) -> list[Stored]:
    """Counts a model with the experts of some MoE layers in several layouts.

    Args:
      config, layers, layouts: the model, and what is counted.
      asked: fields of `Wanted`, of which every form takes what it asks for. `keep` is the share, in (0, 1], of the
        entries of an expert that sparse forms keep; low-rank ones have as many numbers; or of neurons or experts, where
        these are fewer. `bits` are those of the entries of sparse forms.
      base, base_codes: whether experts share a centre, and its codes in forms that have one; None: the model's dtype.
      dtype: of all parameters; None: that of the config.

    Raises:
      InputError: if a form does not go with the options or the shape of the experts.
    """
    check_keep(asked.get("keep", 1.0))
    kind = jnp.dtype(dtype or config.dtype)
    specs = leaf_specs(config, dtype)
    prefixes = tuple(f"layers/{i}/mlp/{leaf}" for i in layers for leaf in ("experts/", "groups"))
    before = count_bytes(spec for path, spec in specs.items() if path.startswith(prefixes))
    weights = 0
    for moe in map(config.moe, layers):  # as full kernels, biases included
        weights += moe.bank_experts * sum(_weights_of(moe.expert, config.d_model))
    counted = []
    for layout in layouts:
        of_shape: dict[MoEConfig, LayerBytes] = {}  # layers are mostly alike, and are counted once
        left: dict[MoEConfig, int] = {}
        outputs = 0
        for i in layers:
            moe = config.moe(i)
            if moe not in of_shape:
                target = layer_in(layout, moe, config.d_model, asked, base=base, base_codes=base_codes)
                found = _compared(layout, target, config.d_model, layer_bytes(target, config.d_model, kind))
                if moe.extended and not target.extended:  # the universal FFN was an expert, and is still counted
                    kernels, biases = _weights_of(target.universal_ffn, config.d_model)
                    more = {"values": found.values + kernels * kind.itemsize}
                    found = dataclasses.replace(found, **more, biases=found.biases + biases * kind.itemsize)
                of_shape[moe] = found
                left[moe] = target.num_experts
            paths = (f"layers/{i}/mlp/{leaf}" for leaf in ROUTER_LEAVES_BY_EXPERT)
            of_router = count_bytes(specs[path] for path in paths if path in specs)
            outputs += of_router * (moe.num_experts - left[moe]) // moe.num_experts
        experts = sum(of_shape[config.moe(i)].total for i in layers)
        counted.append(
            Stored(
                form=layout.name,
                layer=of_shape[config.moe(layers[0])],
                expert_bytes=experts,
                model_bytes=count_bytes(specs.values()) - before + experts - outputs,
                share=experts / before,
                bits_per_weight=8 * experts / weights,
                written=not (isinstance(layout, Layout) and layout.position_bytes),
            )
        )
    return counted


def layer_in(
    layout: AnyLayout,
    moe: MoEConfig,
    d_model: int,
    asked: Mapping[str, Any],
    *,
    base: Literal["shared", "none"] = "shared",
    base_codes: BaseCodes | None = None,
) -> MoEConfig:
    """Returns a layer in a layout, see `stored_bytes`; of one that is never written, in what it is compared with."""
    if isinstance(layout, Fewer):
        return layout.layer(moe, asked["keep"])
    own = {name: value for name, value in asked.items() if name in layout.form.asks_for}
    form = Wanted(form=layout.form, **{**own, **layout.options}).made(moe.expert, d_model, moe.bank_experts)
    bank = BankConfig(form, base=base if base in form.allowed_bases else "none")
    if bank.has_base:
        bank = dataclasses.replace(bank, base_codes=base_codes)
    bank.check_fits(moe.expert, d_model)
    return dataclasses.replace(moe if form.over_base else full_experts(moe), bank=bank)


def _weights_of(ffn: FFNConfig, d_model: int) -> tuple[int, int]:
    """The numbers of entries of the kernels and of the biases of an FFN."""
    shapes = ffn.shapes(d_model).values()
    return sum(map(math.prod, shapes)), sum(shape[1] for shape in shapes) if ffn.bias else 0


def disk_bytes(moe: MoEConfig, d_model: int, dtype: jnp.dtype) -> int:
    """The bytes of the experts of a layer on the disk, Zarr's metadata included; see `layer_bytes`."""
    return layer_bytes(moe, d_model, dtype).total + LEAF_OVERHEAD * len(_bank_leaves(moe, d_model, dtype))


def disk_bytes_by_matrix(moe: MoEConfig, d_model: int, dtype: jnp.dtype) -> dict[str, int]:
    """`disk_bytes` of the leaves of every matrix; for experts whose matrices have no leaves in common."""
    sizes = dict.fromkeys(moe.expert.matrices, 0)
    for path, leaf in _bank_leaves(moe, d_model, dtype).items():
        (name,) = set(path.split("/")) & sizes.keys()
        sizes[name] += count_bytes([leaf]) + LEAF_OVERHEAD
    return sizes


def layer_bytes(moe: MoEConfig, d_model: int, dtype: jnp.dtype) -> LayerBytes:
    """The bytes of the experts of a layer; d_model is the width of the model, the dtype that of its parameters."""
    sizes = dict.fromkeys((field.name for field in dataclasses.fields(LayerBytes)), 0)
    for path, leaf in _bank_leaves(moe, d_model, dtype).items():
        sizes[_part(path, moe.bank.form)] += count_bytes([leaf])
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
    """The bytes of the experts of some layers, by part in words; what has no codes has the config's dtype."""
    parts = [layer_bytes(config.moe(layer), config.d_model, jnp.dtype(config.dtype)) for layer in layers]
    return {title: sum(getattr(part, name) for part in parts for name in names) for title, names in _PARTS.items()}


@lru_cache(maxsize=4096)
def _bank_leaves(moe: MoEConfig, d_model: int, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of all leaves of the bank of a layer, by path."""
    bank = shapes_of(lambda rngs: make_bank(moe.bank, moe.expert, moe.bank_experts, d_model, rngs=rngs, dtype=dtype))
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(bank))}


def _compared(layout: AnyLayout, moe: MoEConfig, d_model: int, counted: LayerBytes) -> LayerBytes:
    """The bytes of the layer in a layout that is never written."""
    if isinstance(layout, Fewer) or layout.position_bytes is None:
        return counted
    form = moe.bank.form
    assert isinstance(form, Encodable)
    entries = sum(form.kept_entries(matrix) or 0 for matrix in ffn_matrices(moe.expert, d_model).values())
    places = moe.bank_experts * entries * layout.position_bytes
    return dataclasses.replace(
        counted, places=places, row_pointers=counted.row_pointers if layout.has_row_pointers else 0
    )


def _part(path: str, form: ExpertForm) -> str:
    """The field of `LayerBytes` that a leaf of a bank counts for."""
    leaf = path.rpartition("/")[2]
    if path.startswith("base/"):
        return "centre"
    if leaf == "bias":
        return "biases"
    if not isinstance(form, Storable) or leaf not in form.places:
        return "values"
    return "row_pointers" if leaf in form.row_pointers else "places"
