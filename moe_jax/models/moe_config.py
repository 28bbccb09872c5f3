"""`MoEConfig`: the description of a layer's Mixture-of-Experts, with its selection and its PEFT experts."""

import dataclasses
from typing import Literal

from moe_jax.core.errors import InputError, check_member, check_number, check_positive
from moe_jax.core.formatting import short_repr
from moe_jax.experts.bank_config import BankConfig
from moe_jax.experts.shapes import AdapterConfig, FFNConfig, LoRAConfig
from moe_jax.functional.routing.gates import GATES, GROUP_SCORES, Selection, weights_are_constant
from moe_jax.functional.routing.route import BALANCE_CHOICES
from moe_jax.functional.routing.universal import GATE_BESIDE, UNIVERSAL
from moe_jax.models.own_parts import LINEAR, ROUTERS

VARIANTS = ("routed", "embedded", "dense", "single")

ROUTER_LEAVES_BY_EXPERT = tuple(f"router/{name}" for name in ("kernel", "bias", "selection_bias", "expert_scale"))
"""Leaves of a linear router that have an entry for every expert, on the last axis; paths within an MoE."""

# Most experts of a layer, and of all layers together: far above any known model, and few enough to be handled.
MAX_EXPERTS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerftConfig:
    """PEFT experts beside a frozen MoE (PERFT; methods.md 7).

        >>> moe_jax.PerftConfig(variant="single", adapter=moe_jax.AdapterConfig(rank=8)).num_experts
        1

    Attributes:
      variant: `routed` (R): M adapters with a router of their own; `embedded` (E): one adapter for every output of
        the MoE's router, with its weights; `dense` (D): M adapters that see every token; `single` (S): one such
        adapter.
      adapter: the form of each adapter.
      num_experts: M; for `embedded`, the number of experts of the MoE.
      top_k: adapters per token K; for `routed` only.
      gate: gate of the router of `routed`, one of `functional.routing.gates.GATES`.
      balance_coef, z_coef: of that router's auxiliary losses.
    """

    variant: Literal["routed", "embedded", "dense", "single"]
    adapter: AdapterConfig
    num_experts: int = 1
    top_k: int | None = None
    gate: str = "softmax_topk"
    balance_coef: float = 0.01
    z_coef: float = 0.0

    __repr__ = short_repr

    def describe(self) -> str:
        """Returns the PEFT experts in words: `4 routed adapters of rank 8, top-2`."""
        top_k = "" if self.top_k is None else f", top-{self.top_k}"
        return f"{self.num_experts} {self.variant} adapters of rank {self.adapter.rank}{top_k}"

    def __post_init__(self) -> None:
        check_member("PERFT variant", self.variant, VARIANTS)
        check_positive(self, "num_experts", at_most=MAX_EXPERTS)
        check_positive(self, "top_k")
        check_number(self, "balance_coef", "z_coef", at_least=0)
        GATES.check("gate", self.gate)
        if self.variant == "single" and self.num_experts != 1:
            raise InputError(f"PERFT-S is one adapter, num_experts={self.num_experts}")
        if (self.top_k is not None) != (self.variant == "routed"):
            raise InputError(f"top_k={self.top_k} does not go with PERFT {self.variant!r}: 'routed' has one")
        if self.top_k is not None and not 1 <= self.top_k <= self.num_experts:
            raise InputError(f"top_k={self.top_k} must lie between 1 and the number of adapters, {self.num_experts}")
        if self.gate == "top1" and self.top_k != 1:
            raise InputError(f"gate 'top1' routes to one adapter, top_k={self.top_k}")
        if self.top_k is not None and weights_are_constant(self.gate, self.top_k, self.num_experts):
            raise InputError(
                f"top_k=1 with gate {self.gate!r} weights an adapter by 1 whatever its router says, which then learns "
                "nothing from the task; use gate 'softmax_topk' or 'top1', or a larger top_k"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Restricts the choice of experts beyond the router's logits (DeepSeek-V2 and -V3).

    Attributes:
      bias: the router has a bias that is added to the scores to choose by, and to nothing else.
      groups: number of groups of consecutive experts.
      top_groups: experts are chosen from this many best groups.
      group_score: a group's score is that of its `best` expert (V2), or the sum of its `best_two` (V3).
    """

    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_positive(self, "groups", "top_groups")
        check_member("group_score", self.group_score, GROUP_SCORES)
        if self.top_groups > self.groups:
            raise InputError(f"top_groups={self.top_groups} is above groups={self.groups}")

    def check_fits(self, num_experts: int, top_k: int) -> None:
        """Raises `InputError` unless `top_k` of this many experts can be chosen in this way."""
        Selection(None, self.groups, self.top_groups, self.group_score).check_fits(num_experts, top_k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A Mixture-of-Experts layer.

        >>> shared = moe_jax.BankConfig(kind="low-rank", rank=4)
        >>> moe_jax.MoEConfig(expert=moe_jax.FFNConfig(dim=32), num_experts=8, top_k=2, bank=shared).bank_experts
        8

    Attributes:
      expert: shape of one expert.
      num_experts: E.
      top_k: experts per token k.
      gate: `topk_softmax`, `softmax_topk`, `top1`, `sigmoid_topk`, `topk_sigmoid` (methods.md 1), `sparse_mixer`
        (Phi-3.5-MoE), or what `functional.register_gate` has added. It has no effect beside a universal FFN that brings
        a gate of its own. With top_k 1, a gate whose weights sum to 1 is meant for existing checkpoints with it: see
        `router_learns`.
      gate_scale: factor of the gate's weights.
      weighs_inputs: an expert's input is multiplied by its weight, and its output is not (Llama 4).
      selection: restricts the choice of experts beyond the logits.
      bank: the form of the experts' kernels.
      balance_coef, z_coef, cv_coef: coefficients of the auxiliary losses; 0 leaves a loss out.
      sequence_balance_coef: coefficient of the same loss within every sequence, or packed document, by itself, as
        DeepSeek's models are trained; of several, by their tokens.
      balance_choices: the choices of a token that the load in the balance loss counts: `all` k, or its `first` alone
        (GShard, and so DeepSpeed, by which MoE-LLaVA is trained).
      capacity_factor: None is dropless; otherwise an expert takes at most `ceil(capacity_factor * n * k / E)`
        assignments of a sequence of n tokens, padding not counted; the others are dropped (residual only).
      capacity_rows: where it is given, an expert's capacity is that of so many rows of a batch together, as of a device
        of DeepSpeed's: padding counts, and takes room; first choices come before second ones; the weights of what is
        left of a token are as large together as before; and in calls without a random key, which are not of training,
        nothing is dropped.
      universal: an FFN that sees every token, also called a shared expert, and how it is weighted. With `one` its
        weight is 1; with `sigmoid`, the sigmoid of a linear map of the token (Qwen2-MoE). Both go with any gate. Two
        bring their own (methods.md 2.4): with `coder` the router is XFT's gate network, and all weights sum to 1; with
        `med` its weight is 1, beside `softmax_topk`. `none`: there is none.
      extended: the universal FFN is not a separate FFN but the last delta of the bank, over the base that the experts
        share.
      universal_dim: hidden width of a universal FFN beside the bank; None: that of an expert. Compressed experts can
        be narrower than it.
      merged_experts: the number G of experts in the bank, if several of the E outputs of the router share one; None: E.
      perft: PEFT experts beside the MoE.
      branch_norm_eps: the MoE is given activations without a norm, and its branches norm them for themselves (Gemma 4):
        RMSNorms with this epsilon stand before and after the experts, before and after the universal FFN, and before a
        linear router, whose input is divided by sqrt(d) besides. None: the layer norms what the MoE is given.
      expert_scales: a linear router has a number for every expert, by which its weights are multiplied (Gemma 4).
      router_lora: LoRA on the kernel of a linear router; its only target is `router`.
      router_bias: a linear router has a bias (Med-MoE).
      router: `linear`, or what `nn.register_router` has added.
    """

    expert: FFNConfig
    num_experts: int
    top_k: int
    gate: str = "topk_softmax"
    gate_scale: float = 1.0
    weighs_inputs: bool = False
    selection: SelectionConfig = SelectionConfig()
    bank: BankConfig = BankConfig()
    balance_coef: float = 0.01
    z_coef: float = 0.0
    cv_coef: float = 0.0
    sequence_balance_coef: float = 0.0
    balance_choices: Literal["all", "first"] = "all"
    capacity_factor: float | None = None
    capacity_rows: int | None = None
    universal: Literal["none", "coder", "med", "one", "sigmoid"] = "none"
    extended: bool = False
    universal_dim: int | None = None
    merged_experts: int | None = None
    perft: PerftConfig | None = None
    branch_norm_eps: float | None = None
    expert_scales: bool = False
    router_lora: LoRAConfig | None = None
    router_bias: bool = False
    router: str = LINEAR

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_positive(self.expert, "dim")
        check_positive(self, "num_experts", at_most=MAX_EXPERTS)
        check_positive(self, "top_k", "universal_dim", "merged_experts", "capacity_rows")
        check_number(self, "gate_scale", "capacity_factor", "branch_norm_eps", above=0)
        check_number(self, "balance_coef", "z_coef", "cv_coef", "sequence_balance_coef", at_least=0)
        check_member("balance_choices", self.balance_choices, BALANCE_CHOICES)
        GATES.check("gate", self.gate)
        if self.top_k > self.num_experts:
            raise InputError(f"top_k={self.top_k} is above num_experts={self.num_experts}")
        if self.capacity_rows is not None and self.capacity_factor is None:
            raise InputError(f"capacity_rows={self.capacity_rows} needs a capacity_factor, which says how many fit")
        if self.gate == "top1" and self.top_k != 1:
            raise InputError(f"gate 'top1' routes to one expert, top_k={self.top_k}")
        self.selection.check_fits(self.num_experts, self.top_k)
        if self.merged_experts is not None and not 1 <= self.merged_experts <= self.num_experts:
            raise InputError(
                f"merged_experts={self.merged_experts} must lie between 1 and num_experts={self.num_experts}, "
                "or be null for one expert per output of the router"
            )
        self._check_universal()
        self._check_router()
        self._check_adapters()
        self.bank.check_count(self.bank_experts)

    def _check_router(self) -> None:
        ROUTERS.check("router", self.router)
        if self.router == LINEAR:
            if self.router_bias and self.universal == "coder":
                raise InputError("router_bias goes with a linear router, and universal 'coder' has a gate network")
            return
        alone = {
            "branch_norm_eps": self.branch_norm_eps is not None,
            "expert_scales": self.expert_scales,
            "router_lora": self.router_lora is not None,
            "router_bias": self.router_bias,
            "selection.bias": self.selection.bias,
        }
        beside = {f"universal {name!r}": self.universal == name for name in ("coder", "sigmoid")}
        for what, given in {**alone, **beside}.items():
            if given:
                raise InputError(f"{what} goes with a linear router, and not with {self.router!r}")

    def _check_adapters(self) -> None:
        if self.bank.form.needs_unit_weights:
            # So that the shared FFN counts once (methods.md 6).
            plain = self.gate == "topk_softmax" and self.universal == "none" and self.capacity_factor is None
            plain = plain and self.gate_scale == 1.0
            if not plain or self.merged_experts is not None:
                raise InputError(
                    f"{self.bank.kind} experts go with gate 'topk_softmax' alone: no universal FFN, capacity or merged "
                    "experts"
                )
        if self.expert_scales and (self.bank.form.needs_unit_weights or self.universal == "coder"):
            raise InputError("expert_scales goes with a linear router and with experts whose weights need not sum to 1")
        if self.weighs_inputs and (self.bank.form.needs_unit_weights or self.extended or self.universal == "coder"):
            raise InputError(
                "weighs_inputs goes with experts that are weighted one by one, and with none that sees all"
            )
        if self.perft is not None and self.perft.variant == "embedded" and self.perft.num_experts != self.num_experts:
            raise InputError(
                f"PERFT-E has one adapter for each of the MoE's {self.num_experts} experts, "
                f"num_experts={self.perft.num_experts}"
            )
        if self.router_lora is not None:
            self.router_lora.check_targets(("router",))
            if self.universal == "coder":
                raise InputError("LoRA goes with a linear router, and universal 'coder' has a gate network")
        if (self.expert.lora is not None or self.expert.nf4) and not self.bank.has_linear_maps:
            what = "LoRA on experts" if self.expert.lora is not None else "NF4"
            raise InputError(
                f"{what} needs full kernels or a shared base that is applied on its own, and {self.bank.kind} experts "
                f"with base {self.bank.base!r} have neither; use PERFT"
            )
        alone = [name for name in self.expert.matrices if not self.bank.has_base_of(name)]
        if self.expert.lora is not None and self.bank.has_base and alone:
            raise InputError(
                f"LoRA on experts needs a base of every matrix, and {', '.join(alone)} of these have none; use PERFT"
            )
        if self.expert.nf4 and self.bank.base_codes is not None:
            raise InputError("nf4 does not go with a base that is in codes already")
        if self.expert.lora is not None and self.bank.meets_sorted_rows and self.expert.lora.dropout:
            raise InputError("LoRA on full experts has no dropout: their inputs are sorted rows; set it to 0")

    def _check_universal(self) -> None:
        check_member("universal", self.universal, UNIVERSAL)
        if self.universal in GATE_BESIDE and self.gate != MoEConfig.gate:
            raise InputError(
                f"gate {self.gate!r} does not go with universal {self.universal!r}, which weights the experts itself"
            )
        if self.universal == "coder" and self.selection != SelectionConfig():
            raise InputError("universal 'coder' chooses by the logits of its gate network alone: leave selection out")
        if self.extended and self.universal == "none":
            raise InputError("extended needs a universal FFN ('coder' or 'med') to extend the bank by")
        if self.extended and not self.bank.form.over_base:
            raise InputError(
                f"extended needs experts over a shared base, and {self.bank.kind} experts have none; use another delta"
            )
        if self.branch_norm_eps is not None and (self.universal != "one" or self.extended):
            raise InputError("branch_norm_eps goes with universal 'one', an FFN beside the bank")
        if self.universal_dim is not None and not self.universal_beside:
            raise InputError(f"universal_dim={self.universal_dim} needs a universal FFN beside the bank")

    def describe(self) -> str:
        """Returns the MoE in words: `MoE of 8 experts, top-2, low-rank, rank 4; FFN of 1,536, gated silu`."""
        without = " without a base" if self.bank.form.over_base and not self.bank.has_base else ""
        words = [f"MoE of {self.num_experts} experts, top-{self.top_k}, {self.bank.describe()}{without}"]
        words += [] if self.merged_experts is None else [f"merged into {self.merged_experts}"]
        words += [self.expert.describe()]
        words += [] if self.universal == "none" else [f"universal FFN ({self.universal})"]
        words += [] if self.perft is None else [self.perft.describe()]
        words += [] if self.router == LINEAR else [f"router {self.router}"]
        words += [] if self.router_lora is None else [f"router with {self.router_lora.describe()}"]
        return "; ".join(words)

    @property
    def weighting(self) -> str:
        """The gate that `route` uses: that of the universal FFN if it brings one, otherwise `gate`."""
        return GATE_BESIDE.get(self.universal, self.gate)

    @property
    def balanced_choices(self) -> int:
        """Number of a token's choices that the balance loss counts."""
        return self.top_k if self.balance_choices == "all" else 1

    @property
    def router_learns(self) -> bool:
        """Whether a gradient of the task reaches the router; otherwise only auxiliary losses train it."""
        return not weights_are_constant(self.weighting, self.top_k, self.num_experts)

    @property
    def universal_beside(self) -> bool:
        """Whether the universal FFN is a module of its own."""
        return self.universal != "none" and not self.extended

    @property
    def universal_ffn(self) -> FFNConfig:
        """The universal FFN beside the bank."""
        return self.expert if self.universal_dim is None else dataclasses.replace(self.expert, dim=self.universal_dim)

    @property
    def routed_experts(self) -> int:
        """Number of the bank's experts that the router chooses from: E, or G if they are merged."""
        return self.num_experts if self.merged_experts is None else self.merged_experts

    @property
    def bank_experts(self) -> int:
        """Number of experts in the bank: E, or G if they are merged, and one more if the universal FFN is its last."""
        return self.routed_experts + self.extended

    @property
    def perft_top_k(self) -> int:
        """Number of PEFT experts that a token is routed to; 0 if there are none."""
        if self.perft is None:
            return 0
        chosen = {"routed": self.perft.top_k, "embedded": self.top_k}
        return chosen.get(self.perft.variant, self.perft.num_experts)

    @property
    def bank_top_k(self) -> int:
        """Number of the bank's experts that a token is routed to: k, plus 1 if the universal FFN is in the bank."""
        return self.top_k + self.extended
