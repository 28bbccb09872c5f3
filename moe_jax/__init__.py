"""Mixture-of-Experts from dense models: upcycle, tune, compress. One shared base plus something small per expert.

What is listed here is the public API; anything else may change without notice. Names are imported when they are first
asked for: `import moe_jax` alone does not import JAX.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_jax.api.classify import classify as classify
    from moe_jax.api.compress import CompressedExperts as CompressedExperts
    from moe_jax.api.compress import compress as compress
    from moe_jax.api.compress import compress_experts as compress_experts
    from moe_jax.api.generate import Continuation as Continuation
    from moe_jax.api.generate import generate as generate
    from moe_jax.api.model import Model as Model
    from moe_jax.api.model import load as load
    from moe_jax.api.model import save as save
    from moe_jax.api.model import tiny_model as tiny_model
    from moe_jax.api.run import ModelPlan as ModelPlan
    from moe_jax.api.run import evaluate as evaluate
    from moe_jax.api.run import plan as plan
    from moe_jax.api.train import train as train
    from moe_jax.api.transform import adapt as adapt
    from moe_jax.api.transform import convert as convert
    from moe_jax.api.transform import export as export
    from moe_jax.api.transform import merge as merge
    from moe_jax.api.transform import upcycle as upcycle
    from moe_jax.compress.alignment.barycenter import Barycenter as Barycenter
    from moe_jax.compress.alignment.barycenter import free_support_barycenter as free_support_barycenter
    from moe_jax.errors import InputError as InputError
    from moe_jax.experts import AdapterBank as AdapterBank
    from moe_jax.experts import AdapterConfig as AdapterConfig
    from moe_jax.experts import BankConfig as BankConfig
    from moe_jax.experts import ExpertBank as ExpertBank
    from moe_jax.experts import FFNConfig as FFNConfig
    from moe_jax.experts import KernelBank as KernelBank
    from moe_jax.experts import LoRAConfig as LoRAConfig
    from moe_jax.experts import make_bank as make_bank
    from moe_jax.functional.relative_bias import RelativeBiasConfig as RelativeBiasConfig
    from moe_jax.functional.rope import RopeConfig as RopeConfig
    from moe_jax.functional.routing import route as route
    from moe_jax.models import AttentionConfig as AttentionConfig
    from moe_jax.models import LatentConfig as LatentConfig
    from moe_jax.models import LayerConfig as LayerConfig
    from moe_jax.models import ModelConfig as ModelConfig
    from moe_jax.models import MoEConfig as MoEConfig
    from moe_jax.models.moe_config import PerftConfig as PerftConfig
    from moe_jax.nn.decoder import Decoder as Decoder
    from moe_jax.nn.moe import MoE as MoE
    from moe_jax.train.classification import Classification as Classification
    from moe_jax.train.evaluation import Evaluation as Evaluation
    from moe_jax.train.recipe import Recipe as Recipe

__version__ = "0.1.0"

_MODULES = {
    "api.compress": ("CompressedExperts", "compress", "compress_experts"),
    "api.classify": ("classify",),
    "api.generate": ("Continuation", "generate"),
    "api.model": ("Model", "load", "save", "tiny_model"),
    "api.run": ("ModelPlan", "evaluate", "plan"),
    "api.train": ("train",),
    "api.transform": ("adapt", "convert", "export", "merge", "upcycle"),
    "compress.alignment.barycenter": ("Barycenter", "free_support_barycenter"),
    "errors": ("InputError",),
    "experts": (
        "AdapterBank",
        "AdapterConfig",
        "BankConfig",
        "ExpertBank",
        "FFNConfig",
        "KernelBank",
        "LoRAConfig",
        "make_bank",
    ),
    "functional.relative_bias": ("RelativeBiasConfig",),
    "functional.rope": ("RopeConfig",),
    "functional.routing": ("route",),
    "models": ("AttentionConfig", "LatentConfig", "LayerConfig", "MoEConfig", "ModelConfig"),
    "models.moe_config": ("PerftConfig",),
    "nn.decoder": ("Decoder",),
    "nn.moe": ("MoE",),
    "train.classification": ("Classification",),
    "train.evaluation": ("Evaluation",),
    "train.recipe": ("Recipe",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
# Type checkers go by the imports above, which a test compares with this table.
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'moe_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"moe_jax.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Some verbs are called like the room that they come from, such as `train`.

    When a room is imported, Python makes it an attribute of this package. Here the verb stays the attribute, whatever
    is imported when; `from moe_jax.train import ...` finds the room all the same.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
