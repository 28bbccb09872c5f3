"""What models become before they are trained, by name: MoEs of every kind, adapters, LoRA."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_jax.functional.routing.route import route
from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.functional.routing.token_choices import Routing
from moe_jax.models import ModelConfig
from moe_jax.nn.moe import Perft
from moe_jax.peft.adapt import adapted_config
from moe_jax.peft.spec import AdaptSpec
from moe_jax.upcycling import DenseParameters, UpcycleSpec, upcycled_config
from moe_jax.upcycling.dense_to_moe import with_rest

EXPERTS, TOP_K = 8, 2
BTX, PROMPTED, DRAWN = "btx", "prompted", "drawn"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Attributes:
    config: what it makes of the config of the model that it begins with.
    spec: what is done to copies of FFNs.
    parts: `BTX`: experts are from models of one domain each; `PROMPTED`: routers are made of texts; `DRAWN`: all
      weights are new.
    patched: a context in which it is trained.
    """

    config: Callable[[ModelConfig], ModelConfig] = lambda config: config
    spec: UpcycleSpec = UpcycleSpec()
    parts: str = ""
    patched: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def shape_of(name: str) -> Shape:
    """The shape of a name, such as `LM r=4, frozen base`, `PESC 8 LoRA 16` or `PERFT-R 2/8 r=8`.

    Raises:
      ValueError: for a name that is none.
    """
    for pattern, make in _SHAPES.items():
        if match := re.fullmatch(pattern, name):
            return make(*match.groups())
    raise ValueError(f"there is no shape {name!r}")


def _upcycled(*, every: int = 2, experts: int = EXPERTS, parts: str = "", **options: object) -> Shape:
    spec = UpcycleSpec(experts=experts, top_k=TOP_K, every=every, balance_coef=0.01, **options)
    return Shape(partial(upcycled_config, spec=spec), spec=spec, parts=parts)


def _deltas(kind: str, number: str, variant: str | None) -> Shape:
    delta = {"LM r": f"low-rank:{number}", "SM ": f"sparse:{number}"}[kind]
    options = {"delta": delta, "freeze_base": variant == "frozen base"}
    if variant in ("universal", "extended"):
        return _upcycled(**options, universal="coder", extended=variant == "extended")
    return _upcycled(**options)


def _pesc(adapter: str, kind: str, rank: str | None) -> Shape:
    """Adapters of a width in every layer, and LoRA, QLoRA or nothing beside them; scale and dropout as published."""
    return _upcycled(method="pesc", every=1, adapter=adapter, rest=_rest(kind, rank))


def _lora(kind: str, rank: str) -> Shape:
    return Shape(partial(with_rest, rest=_rest(kind, rank)))


def _rest(kind: str, rank: str | None) -> DenseParameters:
    return DenseParameters(kind=kind.lower(), rank=int(rank) if rank else None)


def _adapted(method: str, kind: str = "lora", *, rank: str, **options: object) -> Shape:
    return Shape(partial(adapted_config, spec=AdaptSpec(method=method, adapter=f"{kind}:{rank}", **options)))


def _routed(top_k: str, adapters: str, rank: str, of_base: str | None) -> Shape:
    shape = _adapted("perft-r", rank=rank, experts=int(adapters), top_k=int(top_k))
    return dataclasses.replace(shape, patched=_with_weights_of_the_base) if of_base else shape


@contextlib.contextmanager
def _with_weights_of_the_base() -> Iterator[None]:
    """PERFT-R as the public code for OLMoE computes it: its own router chooses, the base's router weights.

    No gradient of the task reaches PERFT-R's router so (methods.md 7); only its balance loss trains it.
    """

    def call(
        self: Perft, x: Float[Array, "T d"], moe: Routing, valid: Bool[Array, " T"] | None, key: Array | None
    ) -> tuple[Float[Array, "T d"], tuple[RouterStats, ...]]:
        own, stats = route(self.router(x), self.config.top_k, self.config.gate, valid=valid)
        count = own.weights.shape[1]
        weights = jnp.where(own.weights == 0, 0, moe.weights[:, :count])
        return self.adapters(x, own._replace(weights=weights), key), (stats,)

    correct = Perft.__call__
    Perft.__call__ = call
    try:
        yield
    finally:
        Perft.__call__ = correct


_NUMBER = r"([\d.]+)"
_SHAPES: dict[str, Callable[..., Shape]] = {
    "as it is": Shape,
    r"vanilla(?:, (\d+) experts)?(, every layer)?": lambda experts, every_layer: _upcycled(
        every=1 if every_layer else 2, experts=int(experts or EXPERTS)
    ),
    "vanilla, from random weights": lambda: _upcycled(parts=DRAWN),
    "experts from models": lambda: _upcycled(experts=3, parts=BTX, experts_from=("one", "two", "three")),
    "vanilla, 3 experts, routers from texts": lambda: _upcycled(experts=3, parts=PROMPTED),
    f"noise {_NUMBER}": lambda noise: _upcycled(noise=float(noise)),
    f"drop {_NUMBER}": lambda drop: _upcycled(drop=float(drop)),
    f"granularity {_NUMBER}": lambda pieces: _upcycled(granularity=int(pieces)),
    rf"(LM r|SM )=?{_NUMBER}(?:, (frozen base|universal|extended))?": _deltas,
    rf"PESC {_NUMBER} (LoRA|QLoRA|frozen|full) ?(\d+)?": _pesc,
    r"(LoRA|QLoRA) (\d+)": _lora,
    r"PERFT-R (\d+)/(\d+) r=(\d+)(, weights of the base's router)?": _routed,
    r"PERFT-(E|S)( with SiLU)? r=(\d+)": lambda method, has_silu, rank: _adapted(
        f"perft-{method.lower()}", "parallel" if has_silu else "lora", rank=rank
    ),
    r"PERFT-D (\d+) r=(\d+)": lambda count, rank: _adapted("perft-d", rank=rank, experts=int(count)),
    r"LoRA q,v r=(\d+)": lambda rank: _adapted("lora", rank=rank, targets=("q", "v")),
    r"LoRA router r=(\d+)": lambda rank: _adapted("lora", rank=rank, targets=("router",)),
}
