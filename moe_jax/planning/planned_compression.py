"""The bytes that the experts of a model would take, compressed by a method, in every form of storage."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_jax.compression.coding.storage import FULL, AnyLayout, Fewer, Stored, stored_bytes
from moe_jax.compression.methods.resmoe import residual_forms
from moe_jax.compression.options.around_centre import DEFAULT_BITS
from moe_jax.compression.options.in_common import centre_options
from moe_jax.compression.report import NO_BASE
from moe_jax.compression.spec import METHODS, check_method, check_options, options_of, parse_layers
from moe_jax.compression.stream import choose_layers
from moe_jax.core.code_options import Levels, check_levels, check_scale_bits
from moe_jax.core.errors import InputError, check_member
from moe_jax.core.form_options import check_keep
from moe_jax.experts import BaseCodes
from moe_jax.experts.forms.coding import Layout

if TYPE_CHECKING:
    from moe_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedCompression:
    """The bytes of the experts of some layers in the forms of a method, one entry for every form.

    `keep` is the share of the entries that is kept; None if all are kept, in fewer bits.
    """

    method: str
    keep: float | None
    dtype: str
    layers: tuple[int, ...]
    stored: tuple[Stored, ...]

    @property
    def fewest(self) -> str | None:
        """The form with the fewest bytes among those that hold the same sparse entries and can be written."""
        sparse = [form for form in self.stored if form.layer.places and form.written]
        return min(sparse, key=lambda form: form.expert_bytes).form if len(sparse) > 1 else None

    def to_json(self) -> dict[str, Any]:
        """Returns the forms as JSON, with sizes in bytes."""
        described = dataclasses.asdict(self)
        forms = described.pop("stored")
        for form, of_form in zip(self.stored, forms, strict=True):
            of_form["layer"]["total"], of_form["fewest"] = form.layer.total, form.form == self.fewest
        return {**described, "layers": list(self.layers), "forms": forms}


def planned_compression(
    config: "ModelConfig",
    method: str,
    *,
    keep: float | None,
    residual: str | None,
    storage: str | None,
    bits: int | None,
    centre_bits: str | None,
    centre_group_size: int | None,
    levels: Levels | None,
    scale_bits: int | None,
    zero_points: bool,
    row_scales: bool,
    group_size: int | None,
    compress_layers: str | None,
    dtype: str | None,
) -> PlannedCompression:
    """Counts the bytes of the experts; the arguments are options of `moe-jax plan`.

    Raises:
      InputError: for options that do not go together, or a model without experts.
    """
    check_method(method)
    base = "none" if METHODS[method].origin == NO_BASE else "shared"
    given = {"levels": levels, "scale_bits": scale_bits, "zero_points": zero_points, "row_scales": row_scales}
    of_groups = {} if group_size is None else {"group_size": group_size or None}
    of_share = ["keep"] if keep is not None else []
    check_options([method], [*of_share, *(name for name, value in given.items() if value), *of_groups])
    check_scale_bits(16 if scale_bits is None else scale_bits)
    more = {name: value for name, value in given.items() if name != "levels" and value}
    table = {"table": True} if levels == "fitted" else {}
    format_ = {**METHODS[method].codes_format, **more, **of_groups, **table}
    of_centre = {"table": levels == "fitted", "scale_bits": more.get("scale_bits", 16)}
    planned_bits = METHODS[method].planned_centre_bits
    centre = centre_options(centre_bits or planned_bits, centre_group_size, **of_centre)
    base_codes = None if centre is None else BaseCodes(**centre)
    asked = "centre_bits" in options_of(method)
    if base_codes is not None and planned_bits is None and not asked:
        raise InputError(f"--centre-bits does not go with {method}, which has no centre")
    indices = choose_layers(config, parse_layers(compress_layers, config) if compress_layers is not None else None)
    layouts = _asked_for(method, residual, storage, bits)
    check_levels(levels or "any", _bits_of_codes(layouts), zero_points=zero_points)
    takes_keep = any(isinstance(layout, Fewer) or "keep" in layout.form.asks_for for layout in layouts)
    if keep is None and takes_keep:
        raise InputError(f"--compress {method} needs --keep, the share of the experts that is kept")
    if keep is not None and not takes_keep and any(one is not None for one in (residual, storage, bits)):
        raise InputError(f"--keep does not go with {', '.join(layout.name for layout in layouts)}: every entry stays")
    check_keep(1.0 if keep is None else keep)
    METHODS[method].check_configs({i: config.moe(i) for i in indices}, 1.0 if keep is None else keep)
    dtype = dtype or config.dtype
    sizes = {"keep": 1.0 if keep is None else keep, "bits": bits, **format_}
    stored = stored_bytes(config, indices, layouts, sizes, base=base, base_codes=base_codes, dtype=dtype)
    return PlannedCompression(method=method, keep=keep, dtype=dtype, layers=indices, stored=tuple(stored))


def _bits_of_codes(layouts: Sequence[AnyLayout]) -> int:
    """Returns the bits of the codes of layouts; of several ones those that methods have by default."""
    of_codes = {layout.options["bits"] for layout in layouts if isinstance(layout, Layout) and "bits" in layout.options}
    return of_codes.pop() if len(of_codes) == 1 else DEFAULT_BITS


def _asked_for(method: str, residual: str | None, storage: str | None, bits: int | None) -> tuple[AnyLayout, ...]:
    """Returns the layouts of a method that fit the other options; without those, also full kernels to compare with."""
    every = METHODS[method].layouts
    if residual is None and storage is None and bits is None:
        return (*every, FULL)
    chosen = every
    if residual is not None:
        kind, colon, _ = residual.partition(":")
        forms = residual_forms()
        check_member("residual", kind, tuple(forms))
        if "residual" in options_of(method):  # then it takes every form that residuals can be encoded in
            chosen = forms[kind].layouts()
        chosen = tuple(layout for layout in chosen if isinstance(layout, Layout) and layout.form is forms[kind])
        chosen = tuple(layout for layout in chosen if not colon or layout.name == residual)
        if not chosen:
            names = ", ".join(layout.name for layout in every)
            raise InputError(f"--residual {residual} does not go with {method}, which has {names}")
    if bits is not None:
        chosen = tuple(layout for layout in chosen if isinstance(layout, Layout) and layout.has_bits(bits))
        if not chosen:
            raise InputError(f"--bits {bits}: no form of {method} that the other options leave has them")
    if storage is not None:
        check_member("storage", storage, [layout.name for layout in chosen])
        chosen = tuple(layout for layout in chosen if layout.name == storage)
    return chosen
