"""The options of tuning with few parameters, which `adapt` carries out and `plan` counts."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from moe_jax.peft.options import AdaptOptions


def _arg(default: str, metavar: str) -> object:
    """An option that shows its default, which the method has; None here means that it was not given."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapting:
    """What is to stand beside the model; None where the user said nothing."""

    method: Annotated[
        Literal["perft-r", "perft-e", "perft-d", "perft-s", "lora"] | None,
        tyro.conf.arg(metavar="perft-r|perft-e|perft-d|perft-s|lora", help_behavior_hint="(required)"),
    ] = None
    """PERFT puts adapters beside every MoE: M with a router of their own (perft-r), one for each expert and with the
    MoE's router (perft-e), M that see every token (perft-d), or one (perft-s). lora: products beside --targets."""
    adapter: Annotated[str | None, tyro.conf.arg(metavar="lora:R|parallel:R", help_behavior_hint="(required)")] = None
    """What an adapter is: a product of rank R, or one with SiLU between its factors (PERFT only)."""
    experts: Annotated[int | None, _arg("", "M")] = None
    """perft-r and perft-d: how many adapters there are."""
    top_k: Annotated[int | None, _arg("", "K")] = None
    """perft-r: adapters that a token goes to."""
    targets: Annotated[str | None, _arg("", "q,v,...")] = None
    """lora: the kernels, out of q, k, v, o, gate, up, down and router, in all layers that have them."""
    scale: Annotated[float | None, _arg("2 of lora:R, 1 of parallel:R", "FLOAT")] = None
    """What the adapters' outputs are multiplied by."""
    alpha: Annotated[float | None, _arg("2R", "FLOAT")] = None
    """lora:R: instead of --scale, which is ALPHA/R."""
    dropout: Annotated[float | None, _arg("0.05; of LoRA on full experts 0", "FLOAT")] = None
    """Share of the adapters' inputs set to zero in training."""
    base: Annotated[Literal["stored", "nf4"] | None, _arg("stored", "stored|nf4")] = None
    """How the frozen base is held: as it is stored, or with the kernels of attention, FFNs and experts as NF4 codes."""
    balance_coef: Annotated[float | None, _arg("0.01", "FLOAT")] = None
    """perft-r: coefficient of the load-balancing loss of the adapters' router."""
    z_coef: Annotated[float | None, _arg("0", "FLOAT")] = None
    """perft-r: coefficient of the z-loss of the adapters' router."""
    seed: Annotated[int | None, _arg("0", "INT")] = None
    """Of the adapters and their routers."""
    no_step0_check: bool = False
    """Leaves out the comparison with the untouched model's logits."""


def adapt_options(given: Adapting) -> "AdaptOptions":
    """What to do.

    Raises:
      InputError: if there is no method or adapter.
    """
    from moe_jax.errors import InputError
    from moe_jax.peft.options import AdaptOptions

    if given.method is None or given.adapter is None:
        missing = "--method" if given.method is None else "--adapter"
        raise InputError(f"{missing} is missing, as in --method perft-s --adapter lora:16")
    return AdaptOptions(
        method=given.method,
        adapter=given.adapter,
        scale=given.scale,
        alpha=given.alpha,
        dropout=given.dropout,
        num_experts=given.experts,
        top_k=given.top_k,
        balance_coef=given.balance_coef,
        z_coef=given.z_coef,
        targets=tuple(filter(None, given.targets.split(","))) if given.targets is not None else None,
        base=given.base or "stored",
    )
