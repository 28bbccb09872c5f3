"""The options of `upcycle`, read and checked."""

import dataclasses
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from moe_jax.core.errors import (
    InputError,
    check_member,
    check_number,
    check_positive,
    flag_of,
    nearest,
    raise_if_any,
    shown,
)
from moe_jax.core.form_options import FORM_OPTIONS, FormOptions, delta_options, read_delta
from moe_jax.core.verb_spec import NOT_GIVEN, Shown, TakesMovedBase, TakesNonfinite, name_of

if TYPE_CHECKING:  # they import JAX, and the command line should read options without it
    from moe_jax.experts import BankConfig
    from moe_jax.experts.forms.protocol import ExpertForm
    from moe_jax.experts.shapes import LoRAConfig
    from moe_jax.model_io.model_source import ModelLike

_NOT_OF_PESC = (
    "delta freeze_base universal extended gate router noise drop experts_from rest_from granularity capacity_factor"
).split()
_WHY_FULL = {
    "noise": "noise is no delta of low rank, nor of few entries",
    "drop": "neurons drawn anew are no delta of low rank, nor of few entries",
    "granularity": "experts that are different pieces of the FFN have no base in common",
    "experts_from": "what different models have learnt is no delta of low rank, nor of few entries",
}
_GATES = ("topk_softmax", "softmax_topk", "topk_sigmoid", "top1")
_OF_MOE = ("copies_by", "router_noise", "shared_from")
_FOR_BOTH = ("experts", "top_k", "noise", "seed", "step0_check", "text", "base", "allow_nonfinite")
_RESTS = ("qlora", "lora", "frozen", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseParameters:
    """The treatment of the dense model's attention and FFNs (PESC; methods.md 6); nothing else has LoRA or NF4.

    Attributes:
      kind: `full`: trained like everything else. `frozen`: not trained. `lora`: frozen, with LoRA on every kernel.
        `qlora`: the same with NF4 kernels (Dettmers et al. 2023).
      rank: r of LoRA.
      alpha: LoRA is scaled by alpha/r.
      dropout: on the inputs of LoRA in training.
    """

    kind: Literal["qlora", "lora", "frozen", "full"] = "full"
    rank: int | None = None
    alpha: float = 16.0
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_member("rest", self.kind, _RESTS)
        if (self.rank is not None) != self.has_lora:
            raise InputError(f"rest {self.kind!r} with rank {self.rank}: qlora and lora have a rank, the others none")
        if self.rank is not None and self.rank < 1:
            raise InputError(f"rest: rank {self.rank} must be at least 1")

    @property
    def has_lora(self) -> bool:
        """Whether LoRA is added to every kernel of attention and FFNs."""
        return self.kind in ("qlora", "lora")

    def lora(self, targets: tuple[str, ...]) -> "LoRAConfig | None":
        """Returns the LoRA on these kernels of a module; None without LoRA."""
        from moe_jax.experts.shapes import LoRAConfig

        if not self.has_lora or not targets:
            return None
        assert self.rank is not None
        return LoRAConfig(rank=self.rank, targets=targets, scale=self.alpha / self.rank, dropout=self.dropout)


def parse_rest(text: str) -> DenseParameters:
    """Reads `qlora:R`, `lora:R`, `frozen` or `full`.

    Raises:
      InputError: for anything else, or a rank out of range.
    """
    kind, colon, number = text.partition(":")
    hint = "" if kind in _RESTS else nearest(kind, _RESTS)
    if kind not in _RESTS or bool(colon) != (kind in ("qlora", "lora")):
        raise InputError(f"unknown --rest {shown(text)}{hint}; it is one of qlora:R, lora:R, frozen, full")
    if not colon:
        return DenseParameters(kind=kind)
    try:
        rank = int(number)
    except ValueError:
        raise InputError(f"--rest {shown(text)}: expected a whole number after the colon") from None
    return DenseParameters(kind=kind, rank=rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleSpec(TakesMovedBase, TakesNonfinite):
    """The options of `upcycle`: which Mixture-of-Experts is made of a dense model, or of a smaller one.

    The form of the experts may also be given as an object, such as `delta=moe_jax.configs.LowRank(rank=16)`.

        >>> spec = moe_jax.UpcycleSpec(experts=4, delta="low-rank:2", every=1)
        >>> moe_jax.upcycle(moe_jax.tiny_model(), None, spec).config.moe_layers
        (0, 1)

    Raises:
      InputError: for options that cannot be read or contradict each other.
    """

    method: Annotated[Literal["vanilla", "ders", "pesc"] | None, Shown("vanilla|ders|pesc", "by --delta")] = None
    """vanilla: every expert is a copy of the FFN; ders: the experts share the FFN, and each adds a `delta` to it; pesc:
    the experts share the FFN, and each has an adapter after it (Camelidae)."""
    experts: Annotated[int | None, Shown("N", "8; of an MoE twice its own")] = None
    """Experts per MoE layer; with `granularity`, copies of the FFN that are cut into experts."""
    top_k: Annotated[int | None, Shown("K", "2; of an MoE its own, times the copies if these add up")] = None
    """Experts that a token is routed to. Step 0, of an MoE, with `router_noise` 0: its logits, if every expert gets as
    many copies and K grows with them, for a token then goes to all copies of what it went to (not with gate
    sparse_mixer); or if K stays 1. Otherwise copies of one expert take the place of others, and the check says how far
    off the logits are."""
    copies_by: Literal["even", "use", "gradient"] = "even"
    """Of an MoE: which experts are copied. even: all as often. use: the next copy is of the expert that most tokens of
    `text` go to, for each of its copies; gradient: of the one with the largest norm of the gradient of the loss of
    `text`, likewise. K then stays as it is."""
    router_noise: Annotated[float | None, Shown("STD", "0.01")] = None
    """Of an MoE: Gaussian noise on the router's kernel for the copies, with STD times its standard deviation; what was
    there stays. Step 0 is then a little off the logits of the MoE, and the check says by how much. With 0, and no
    `noise`, copies stay alike in training, unless a bias of selection, or a capacity, tells them apart."""
    shared_from: Annotated[Literal["mean"] | None, Shown("mean", "none")] = None
    """Of an MoE: adds a shared expert with weight 1, as DeepSeek's models have, whose kernels are the mean of those of
    the layer's experts. Needs full experts. Step 0: not the source's logits; the check says how far off they are."""
    every: Annotated[int | None, Shown("N", "2, of pesc 1")] = None
    """Every N-th layer becomes an MoE: with 2, the layers 1, 3, 5, ... counted from 0; with 1, all layers."""
    first: Annotated[int | None, Shown("I", "N - 1")] = None
    """The first of these layers: with `every` 2, 0 is for the layers 0, 2, 4, ..., as in MoE-LLaVA."""
    layers: Annotated[Sequence[int] | None, Shown("N ...", "by --every", tuple[int, ...] | None)] = None
    """The layers that become MoEs, counted from 0."""
    delta: Annotated[
        "str | ExpertForm | BankConfig | None", Shown("full|low-rank:R|sparse:RATE", "full", str | None)
    ] = None
    """The form of an expert: full, a copy of the FFN; or the shared FFN plus a delta per matrix, either of rank R or
    sparse, with the share RATE of its entries (such as 0.9) fixed to zero."""
    adapter: Annotated[str | int | None, Shown("N", "512", str | None)] = None
    """pesc: the width of an adapter."""
    scale: Annotated[float | None, Shown("X", "0.25")] = None
    """pesc: the factor by which the adapters' outputs are multiplied."""
    rest: Annotated[str | DenseParameters | None, Shown("qlora:R|lora:R|frozen|full", "qlora:64", str | None)] = None
    """pesc: how the parameters of the dense model are treated. lora: frozen, with LoRA of rank R on every kernel of
    attention and FFNs; qlora: the same over NF4 kernels; frozen: frozen without LoRA; full: trained."""
    freeze_base: bool = False
    """Freezes the shared FFN in training (low-rank and sparse)."""
    gate: Annotated[str | None, Shown("topk_softmax|softmax_topk|topk_sigmoid|top1", "topk_softmax")] = None
    """Weights of the chosen experts: the softmax over their logits (topk_softmax); their part of the softmax over all
    experts (softmax_topk); their sigmoids, made to sum to 1 (topk_sigmoid: DeepSeek-V3, LFM2); or the softmax's of the
    first alone (top1). Or a gate that has been registered."""
    router: Annotated[str | None, Shown("NAME", "linear")] = None
    """A router that has been registered, in place of a linear one."""
    router_bias: bool = False
    """Gives linear routers a bias, zero at first (Med-MoE)."""
    universal: Literal["none", "coder", "med"] = "none"
    """Adds a universal FFN, a copy of the FFN that sees every token. coder (XFT): its weight is 1 minus the largest
    router probability, so that all weights sum to 1; med (Med-MoE): its weight is 1, and the MoE does not start with
    the dense model's logits."""
    extended: bool = False
    """Stores the universal FFN as one more delta over the shared FFN (low-rank and sparse)."""
    balance_coef: float = 0.01
    """Coefficient of the loss that makes the router use all experts alike, in training."""
    balance_choices: Literal["all", "first"] = "all"
    """The choices of a token that this loss counts: all of its experts; or the first alone, as DeepSpeed does, and so
    MoE-LLaVA."""
    z_coef: float = 0.0
    """Coefficient of the router's z-loss, which keeps its logits small, in training."""
    cv_coef: float = 0.0
    """Coefficient in training of XFT's balance loss, the squared coefficients of variation of importance and load."""
    capacity_factor: Annotated[float | None, Shown("X", "no limit")] = None
    """Bounds the tokens of an expert: to X times the even share of a sequence. Further ones pass the layer by. Step 0:
    so they have not the dense model's logits; the check says how far off they are, and does not fail."""
    capacity_rows: Annotated[int | None, Shown("N", "each sequence")] = None
    """Makes of `capacity_factor` a bound of DeepSpeed's, as in MoE-LLaVA, whose factor is 1.5: of N rows of a batch
    together, those of a device there, padding included, and in training alone."""
    noise: Annotated[float, Shown("STD")] = 0.0
    """Adds Gaussian noise to the kernels of every expert, with STD times the standard deviation of the kernel. Needs
    `delta` full. Step 0: not the dense model's logits; the check says how far off they are, and does not fail."""
    drop: Annotated[float, Shown("R")] = 0.0
    """Drop-Upcycling (Nakamura et al. 2025): the share R, in the paper 0.5, of every expert's neurons, in gate, up and
    down the same, are drawn anew, from a normal distribution with the mean and standard deviation of what they replace.
    Needs `delta` full. Step 0: not the dense model's logits; the check says how far off they are, and does not fail."""
    granularity: Annotated[int, Shown("G")] = 1
    """Granular upcycling (He et al. 2024): every copy of the FFN is cut along its neurons into G experts, so that there
    are G times `experts` experts, of which G times `top_k` are chosen. At first the router chooses all pieces of a copy
    or none. Their outputs are scaled: by G (gate topk_softmax), or by G times `experts` / `top_k` (softmax_topk). Needs
    `delta` full. Step 0: the dense model's logits with topk_softmax, since the pieces add up to the FFN; with
    softmax_topk only as far as the router finds all experts alike, and the check then says how far off they are."""
    experts_from: Annotated["Sequence[ModelLike]", Shown("DIR [DIR ...]", "SRC alone", tuple[Path, ...])] = ()
    """Branch-Train-MiX (Sukhbaatar et al. 2024): expert i has the FFN of the i-th of these models, which have the dense
    model's architecture and tokenizer; all else is their mean. The dense model gives an expert only if it is named too.
    Needs `delta` full. Step 0: not the dense model's logits; the check says how far off they are, and does not fail."""
    rest_from: Annotated[Literal["mean", "base"] | None, Shown("mean|base", "mean")] = None
    """With `experts_from`, what is no expert (attention, norms, embeddings, other FFNs): the mean, or that of the dense
    model."""
    router_from: Annotated[Sequence[str], Shown("TEXT [TEXT ...]", "random", tuple[str, ...])] = ()
    """Routers begin from texts, one for each expert (with `granularity`, each copy), or @FILE for a text in a file: the
    row of an expert is the mean of what the layer's FFN is given for the first 512 tokens of its text, divided by
    its length. Goes with every `delta`. Step 0: unchanged by it, for it only chooses among experts."""
    router_weights: Annotated[str | os.PathLike[str] | None, Shown("FILE", "random", Path | None)] = None
    """The linear router of all layers, in a safetensors or PyTorch file: one matrix [experts, width], and with
    `router_bias` perhaps a bias (Med-MoE). It is trained as others are, unless a recipe freezes it. Step 0: unchanged
    by it."""
    seed: int = 0
    """Seed of all draws: routers, low-rank factors, sparse positions, noise, dropped neurons."""
    step0_check: bool = True
    """Compares the new model's logits with the dense model's, and refuses gates that cannot reproduce them."""
    text: Annotated[str | os.PathLike[str] | None, Shown("FILE", "a built-in text", Path | None)] = None
    """With NF4 kernels (`rest` qlora): a text on which the loss before and after quantising, and the KL divergence, are
    shown; its first 512 tokens. With `copies_by` use or gradient: the text, or file of data, that these are measured
    on."""

    def __post_init__(self) -> None:
        if isinstance(self.layers, str):
            raise InputError(f"layers={shown(self.layers)}: expected indices of layers, counted from 0, such as [1, 3]")
        check_positive(self, "experts", "top_k", "capacity_rows")
        check_number(self, "router_noise", at_least=0)
        check_member("copies_by", self.copies_by, ("even", "use", "gradient"))
        check_member("shared_from", self.shared_from or "mean", ("mean",))
        check_number(self, "balance_coef", "z_coef", "cv_coef", at_least=0)
        check_number(self, "capacity_factor", above=0)
        if self.delta is not None and not isinstance(self.delta, str):
            object.__setattr__(self, "delta", _option_or_bank(self.delta))
        headline = "upcycling" if self.method is None else f"--method {self.method}"
        if self.method == "pesc":
            problems = [f"{flag_of(name)} does not go with adapter experts" for name in _NOT_OF_PESC if self._has(name)]
        else:
            given = [name for name in ("adapter", "scale", "rest") if getattr(self, name) is not None]
            problems = [f"{flag_of(name)} goes with --method pesc only" for name in given] + self._delta_problems()
        raise_if_any(problems, headline)
        check_number(self, "noise", "drop", at_least=0)
        check_positive(self, "granularity")
        check_member("universal", self.universal, ("none", "coder", "med"))
        self._check_registered()
        if self.gate is not None and self.universal != "none":
            raise InputError(f"--gate does not go with --universal {self.universal}, which weights the experts itself")
        if self.rest_from is not None and not self.experts_from:
            raise InputError("--rest-from goes with --experts-from only")
        if self.seed < 0:
            raise InputError(f"seed={self.seed} must not be negative")
        check_member("rest_from", self.rest_from or "mean", ("mean", "base"))
        if self.experts_from and self.experts not in (None, len(self.experts_from)):
            raise InputError(
                f"--experts-from names {len(self.experts_from)} models, each for one expert, and --experts is "
                f"{self.experts}"
            )
        if self.drop > 1:
            raise InputError(f"drop={self.drop} is a share of the neurons, at most 1")
        if self.method == "pesc":
            check_number(self, "scale")
            self._adapter_width()
            self.dense_parameters  # noqa: B018  (checks `rest`)
        elif self._delta_is_over_base(freeze_base=self.freeze_base):
            needs = [f"{flag_of(name)} needs --delta full: {why}" for name, why in _WHY_FULL.items() if self._has(name)]
            raise_if_any(needs, "upcycling")
        raise_if_any(self._contradictions(), "these options do not go together")
        if self.router_from:
            raise_if_any(self.prompt_problems(len(self.router_from)), "upcycling")

    @property
    def copies(self) -> int:
        """Number of copies of the FFN; this is the number of experts unless copies are cut into pieces."""
        if self.experts is not None:
            return self.experts
        return len(self.experts_from) or len(self.router_from) or 8

    @property
    def chosen(self) -> int:
        """Experts that a token is routed to, of an MoE that is made of a dense model."""
        return 2 if self.top_k is None else self.top_k

    def of_moe(self) -> list[str]:
        """Returns the names of the options given that are for MoEs, of which larger ones are made."""
        return [name for name in _OF_MOE if getattr(self, name) not in (None, "even")]

    def of_dense(self) -> list[str]:
        """Returns the names of the options given that are for dense models."""
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in fields if name not in _FOR_BOTH + _OF_MOE and getattr(self, name) != fields[name]]

    @property
    def every_nth(self) -> int:
        """The number N if every N-th layer becomes an MoE."""
        return self.every if self.every is not None else 1 if self.method == "pesc" else 2

    @property
    def weighting(self) -> str:
        """The gate: one of `functional.routing.gates.GATES`."""
        return self.gate or "topk_softmax"

    @property
    def copies_are_plain(self) -> bool:
        """Whether the experts begin as unchanged copies of one FFN."""
        return not (self.noise or self.drop or self.granularity > 1 or self.experts_from)

    @cached_property
    def bank(self) -> "BankConfig":
        """The form of the experts."""
        from moe_jax.experts import BankConfig

        if self.method == "pesc":
            return self._adapter_bank()
        if isinstance(self.delta, BankConfig):
            return self.delta
        return parse_delta(str(self.delta or "full"), freeze_base=self.freeze_base)

    @cached_property
    def dense_parameters(self) -> DenseParameters:
        """How the parameters of the dense model are treated."""
        if self.rest is None:
            return DenseParameters(kind="qlora", rank=64) if self.method == "pesc" else DenseParameters()
        return parse_rest(self.rest) if isinstance(self.rest, str) else self.rest

    def prompt_problems(self, prompts: int) -> list[str]:
        """Returns the problems why routers cannot be made from this number of texts."""
        problems = []
        if prompts != self.copies:
            what = "experts" if self.granularity == 1 else "copies of the FFN that are cut into experts"
            problems.append(f"--router-from has {prompts} texts for {self.copies} {what}; give one for each")
        if self.universal == "coder":
            problems.append("--router-from makes linear routers, and --universal coder has a gate network")
        if self._has_adapters:
            problems.append("--router-from does not go with adapter experts")
        if self.router is not None:
            problems.append(f"--router-from makes linear routers, and --router is {self.router}")
        return problems

    def described(self) -> dict[str, Any]:
        """Returns the options as they are written to the lineage."""
        described = {
            "method": self.method,
            "experts": self.copies,
            "top_k": self.chosen,
            "every": self.every_nth if self.layers is None else None,
            "layers": None if self.layers is None else tuple(self.layers),
            **({} if self.first is None else {"first": self.first}),
            "delta": None if self._has_adapters else self._described_delta(),
            "freeze_base": self.freeze_base,
            "gate": self.weighting if self.universal == "none" else None,
            "universal": self.universal,
            "extended": self.extended,
            "balance_coef": self.balance_coef,
            "z_coef": self.z_coef,
            "cv_coef": self.cv_coef,
            "seed": self.seed,
            "step0_check": self.step0_check,
        }
        if self._has_adapters:
            described |= dataclasses.asdict(self.bank.form) | {"rest": dataclasses.asdict(self.dense_parameters)}
        for name in ("noise", "drop", "granularity", "router", "router_bias"):
            if self._has(name):
                described[name] = getattr(self, name)
        if self.balance_choices != "all":
            described["balance_choices"] = self.balance_choices
        for name in ("capacity_factor", "capacity_rows"):
            if getattr(self, name) is not None:
                described[name] = getattr(self, name)
        if self.router_weights is not None:
            described["router_weights"] = os.fspath(self.router_weights)
        if self.rest_from == "base":
            described["rest_from"] = "base"
        if self.experts_from:
            described["experts_from"] = [name_of(model) for model in self.experts_from]
        if self.router_from:
            described["router_from"] = list(self.router_from)
        return described | {"allow_nonfinite": self.allow_nonfinite}

    def _check_registered(self) -> None:
        """Checks the names of parts that may be the user's own; only for these is JAX imported."""
        if self.gate is not None and self.gate not in _GATES:
            from moe_jax.functional.routing.gates import GATES

            if ":" not in str(self.gate) and self.gate not in GATES.own():
                check_member("gate", self.gate, (*_GATES, *GATES.own()))
            GATES.check("gate", self.gate)
        if self.router is not None:
            from moe_jax.models.own_parts import ROUTERS

            ROUTERS.check("router", self.router)
            if self.granularity > 1:
                raise InputError(
                    f"--granularity needs equal logits for pieces, which --router {self.router} may not give"
                )

    def _adapter_bank(self) -> "BankConfig":
        """Returns PESC's bank; options that are not given are as in the released Camelidae models (methods.md 6)."""
        from moe_jax.experts import AdapterConfig, AdapterExperts, BankConfig

        scale = 0.25 if self.scale is None else self.scale
        adapter = AdapterConfig(rank=self._adapter_width(), activation="gelu", scale=scale, dropout=0.1)
        return BankConfig(AdapterExperts(adapter=adapter))

    def _problems_of_router_weights(self) -> list[str]:
        if self.router_weights is None:
            return []
        others = {"--router-from": bool(self.router_from), f"--router {self.router}": self.router is not None}
        others |= {"--universal coder": self.universal == "coder", "adapter experts": self._has_adapters}
        others |= {"--granularity": self.granularity > 1}
        return [f"--router-weights does not go with {other}" for other, given in others.items() if given]

    @property
    def _has_adapters(self) -> bool:
        """Whether experts are adapters, by the method or by a bank that is given itself."""
        is_bank = self.delta is not None and not isinstance(self.delta, str)
        return self.method == "pesc" or (is_bank and self.bank.form.beside_base_model)

    def _contradictions(self) -> list[str]:
        problems = []
        if self.layers is None and self.every_nth < 1:
            problems.append(f"every={self.every_nth} must be at least 1")
        if self.every is not None and self.layers is not None:
            problems.append("--every and --layers both say which layers become MoEs; give one of them")
        if self.first is not None and self.layers is not None:
            problems.append("--first is the first layer of --every, and --layers names all of them")
        if self.capacity_rows is not None and self.capacity_factor is None:
            problems.append("--capacity-rows needs --capacity-factor, which says how many tokens fit")
        problems += self._problems_of_router_weights()
        is_known = self.experts is not None or self.experts_from or self.router_from
        if is_known and self.chosen > self.copies:
            problems.append(f"top_k={self.chosen} is above num_experts={self.copies}")
        if self.weighting == "top1" and self.chosen != 1:
            problems.append(f"gate 'top1' routes to one expert, top_k={self.chosen}")
        if self.extended and self.universal == "none":
            problems.append("--extended needs a universal FFN to extend the bank by: --universal coder or med")
        return problems

    def _adapter_width(self) -> int:
        width = "512" if self.adapter is None else str(self.adapter)
        if not re.fullmatch(r"0*[1-9]\d{0,8}", width):
            raise InputError(
                f"--adapter {shown(self.adapter)}: of pesc it is the adapters' width, a whole number such as 512"
            )
        return int(width)

    def _delta_is_over_base(self, *, freeze_base: bool = False) -> bool:
        if self.delta is None or isinstance(self.delta, str):
            return _read_delta(self.delta or "full", freeze_base=freeze_base).over_base
        return not self.bank.has_own_kernels

    def _described_delta(self) -> str | dict[str, Any]:
        if self.delta is None or isinstance(self.delta, str):
            return self.delta or "full"
        return dataclasses.asdict(self.delta)

    def _has(self, name: str) -> bool:
        value = getattr(self, name)
        return value not in (*NOT_GIVEN, ()) and not (name == "granularity" and value == 1)

    def _delta_problems(self) -> list[str]:
        """Returns the problems of `delta` with a method that has deltas or copies."""
        over_base = self._delta_is_over_base()
        if self.method == "vanilla" and over_base:
            return [f"its experts are copies, and --delta {self.delta} is another kind; use --method ders"]
        if self.method == "ders" and not over_base:
            offered = [option for kind, option in delta_options().items() if FORM_OPTIONS[kind].over_base]
            return [f"--delta is missing: {' or '.join(offered)}"]
        if self.method not in (None, "vanilla", "ders"):
            return [f"unknown method {shown(self.method)}; it is one of vanilla, ders, pesc"]
        return []


def parse_delta(text: str, *, freeze_base: bool = False) -> "BankConfig":
    """Reads `full`, `low-rank:R`, `sparse:RATE`, or the text that another form writes for itself.

    Raises:
      InputError: for anything else, a number out of range, or a frozen base where there is none.
    """
    from moe_jax.experts import BankConfig  # which makes the forms themselves known

    form: Any = _read_delta(text, freeze_base=freeze_base)
    return BankConfig(form, train_base=not freeze_base)


def _read_delta(text: str, *, freeze_base: bool) -> FormOptions:
    form = read_delta(text)
    if freeze_base and not form.over_base:
        raise InputError(f"--freeze-base needs a shared base, and --delta {text} has none: its experts are copies")
    return form


def _option_or_bank(delta: "ExpertForm | BankConfig") -> "str | BankConfig":
    from moe_jax.experts import BankConfig
    from moe_jax.experts.forms.protocol import option_of_form

    return delta if isinstance(delta, BankConfig) else option_of_form(delta)
