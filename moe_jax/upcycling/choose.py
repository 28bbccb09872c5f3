"""Reads and checks the options of upcycling, under the names that they have on the command line."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

from moe_jax.core.errors import InputError, raise_if_any, shown
from moe_jax.experts import AdapterExperts, BankConfig
from moe_jax.experts.forms.by_name import delta_options, form_named, form_of_option
from moe_jax.upcycling.options import PESC, UpcycleOptions, parse_delta, prompt_problems
from moe_jax.upcycling.rest import parse_rest
from moe_jax.upcycling.start import PLAIN, Start


def chosen_options(
    *,
    method: str | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    every: int | None = None,
    layers: Sequence[int] | None = None,
    delta: str | None = None,
    adapter: str | int | None = None,
    scale: float | None = None,
    rest: str | None = None,
    freeze_base: bool = False,
    gate: str | None = None,
    universal: str | None = None,
    extended: bool = False,
    balance_coef: float | None = None,
    z_coef: float | None = None,
    cv_coef: float | None = None,
    noise: float | None = None,
    drop: float | None = None,
    granularity: int | None = None,
    experts_from: Sequence[Any] | None = None,
    rest_from: Literal["mean", "base"] | None = None,
    router_from: Sequence[str] | None = None,
    seed: int = 0,
    no_step0_check: bool = False,
) -> UpcycleOptions:
    """Reads the options, which `moe-jax upcycle --help` explains, and fills in defaults. None: not given.

    Raises:
      InputError: for options that cannot be read or contradict each other.
    """
    del seed, no_step0_check  # options of the job, not of the model
    absent_of_pesc = {"delta": delta, "freeze-base": freeze_base, "universal": universal}
    absent_of_pesc |= {"extended": extended, "gate": gate, "noise": noise, "drop": drop}
    absent_of_pesc |= {"experts-from": experts_from or None, "rest-from": rest_from}
    absent_of_pesc["granularity"] = None if granularity == 1 else granularity
    only_of_pesc = {"adapter": adapter, "scale": scale, "rest": rest}
    if method == "pesc":
        given = [name for name, value in absent_of_pesc.items() if value not in (None, False, "none", 0)]
        problems = [f"--{name} does not go with adapter experts" for name in given]
    else:
        given = [name for name, value in only_of_pesc.items() if value is not None]
        problems = [f"--{name} goes with --method pesc only" for name in given] + _delta_problems(method, delta)
    raise_if_any(problems, f"--method {method}" if method else "upcycling")
    if gate is not None and universal not in (None, "none"):
        raise InputError(f"--gate does not go with --universal {universal}, which weights the experts itself")
    changes = {
        "num_experts": experts,
        "top_k": top_k,
        "every": every,
        "layers": None if layers is None else tuple(layers),
        "gate": gate,
        "balance_coef": balance_coef,
        "z_coef": z_coef,
        "cv_coef": cv_coef,
        "universal": universal,
    }
    if method == "pesc":
        bank = _adapter_bank(PESC.bank, adapter, scale)
        options = dataclasses.replace(PESC, bank=bank, rest=PESC.rest if rest is None else parse_rest(rest))
    else:
        options = UpcycleOptions(bank=parse_delta(delta or "full", freeze_base=freeze_base), extended=extended)
    models = len(experts_from or ()) or None
    if rest_from is not None and models is None:
        raise InputError("--rest-from goes with --experts-from only")
    if models is not None and experts not in (None, models):
        raise InputError(f"--experts-from names {models} models, each for one expert, and --experts is {experts}")
    changes["num_experts"] = experts or models or len(router_from or ()) or None
    begins = {"noise": noise, "drop": drop, "granularity": granularity, "models": models, "rest_from": rest_from}
    start = Start(**{name: value for name, value in begins.items() if value is not None})
    if not options.bank.has_own_kernels:
        raise_if_any(start.needs_full_experts(), "upcycling")
    given = {name: value for name, value in changes.items() if value is not None}
    options = dataclasses.replace(options, start=start, **given)
    if router_from:
        raise_if_any(prompt_problems(options, len(router_from)), "upcycling")
    return options


def describe_options(chosen: UpcycleOptions, **given: Any) -> dict[str, Any]:
    """The options as they are written to the lineage.

    Args:
      chosen: what `chosen_options` returned.
      given: its arguments.
    """
    pesc = chosen.bank.form.beside_base_model
    described = {
        "method": given.get("method"),
        "experts": chosen.num_experts,
        "top_k": chosen.top_k,
        "every": chosen.every if chosen.layers is None else None,
        "layers": chosen.layers,
        "delta": None if pesc else given.get("delta") or "full",
        "freeze_base": given.get("freeze_base", False),
        "gate": chosen.gate if chosen.universal == "none" else None,
        "universal": chosen.universal,
        "extended": chosen.extended,
        "balance_coef": chosen.balance_coef,
        "z_coef": chosen.z_coef,
        "cv_coef": chosen.cv_coef,
        "seed": given.get("seed", 0),
        "step0_check": not given.get("no_step0_check", False),
    }
    if pesc:
        described |= dataclasses.asdict(chosen.bank.form) | {"rest": dataclasses.asdict(chosen.rest)}
    described |= _changed(chosen.start)
    if chosen.start.models:
        described["experts_from"] = [str(model) for model in given["experts_from"]]
    if given.get("router_from"):
        described["router_from"] = list(given["router_from"])
    return described


def _changed(start: Start) -> dict[str, Any]:
    """What is not as it is by default; the models are named elsewhere."""
    return {
        name: value
        for name, value in dataclasses.asdict(start).items()
        if value != getattr(PLAIN, name) and name != "models"
    }


def _delta_problems(method: str | None, delta: str | None) -> list[str]:
    """Problems of `delta` with a method that has deltas or copies."""
    over_base = delta is not None and form_of_option(delta).over_base
    if method == "vanilla" and over_base:
        return [f"its experts are copies, and --delta {delta} is another kind; use --method ders"]
    if method == "ders" and not over_base:
        offered = [option for kind, option in delta_options().items() if form_named(kind).over_base]
        return [f"--delta is missing: {' or '.join(offered)}"]
    if method not in (None, "vanilla", "ders"):
        return [f"unknown method {shown(method)}; it is one of vanilla, ders, pesc"]
    return []


def _adapter_bank(bank: BankConfig, width: str | int | None, scale: float | None) -> BankConfig:
    """PESC's bank with the given width and scale of its adapters."""
    if width is not None and not re.fullmatch(r"\d{1,9}", str(width)):
        raise InputError(f"--adapter {shown(width)}: of pesc it is the adapters' width, a whole number such as 512")
    assert isinstance(bank.form, AdapterExperts)
    changes = {"rank": None if width is None else int(width), "scale": scale}
    given = {key: value for key, value in changes.items() if value is not None}
    return dataclasses.replace(bank, form=AdapterExperts(adapter=dataclasses.replace(bank.form.adapter, **given)))
