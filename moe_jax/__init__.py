"""Mixture-of-Experts from dense models: upcycle, tune, compress. One shared base plus something small per expert.

What is listed here is the public API; anything else may change without notice. Names are imported when they are first
asked for: `import moe_jax` alone does not import JAX.

Modules and functions to build with are in `moe_jax.nn`, `moe_jax.experts`, `moe_jax.functional`, `moe_jax.peft`,
`moe_jax.upcycling` and `moe_jax.compression`; every config is in `moe_jax.configs`.
"""

from etils import epy as _epy

__version__ = "0.1.0"

with _epy.lazy_api_imports(globals()):
    from moe_jax import compression as compression
    from moe_jax import configs as configs
    from moe_jax import experts as experts
    from moe_jax import functional as functional
    from moe_jax import nn as nn
    from moe_jax import peft as peft
    from moe_jax import typing as typing
    from moe_jax import upcycling as upcycling
    from moe_jax.api.compress import compress as compress
    from moe_jax.api.compress_experts import CompressedExperts as CompressedExperts
    from moe_jax.api.compress_experts import compress_experts as compress_experts
    from moe_jax.api.generate import Continuation as Continuation
    from moe_jax.api.generate import generate as generate
    from moe_jax.api.measure import classify as classify
    from moe_jax.api.measure import evaluate as evaluate
    from moe_jax.api.measure import plan as plan
    from moe_jax.api.model import Model as Model
    from moe_jax.api.model import load as load
    from moe_jax.api.model import save as save
    from moe_jax.api.model import tiny_model as tiny_model
    from moe_jax.api.train import train as train
    from moe_jax.api.transforms import adapt as adapt
    from moe_jax.api.transforms import convert as convert
    from moe_jax.api.transforms import export as export
    from moe_jax.api.transforms import merge as merge
    from moe_jax.api.transforms import upcycle as upcycle
    from moe_jax.compression.alignment.barycenter import Barycenter as Barycenter
    from moe_jax.compression.alignment.barycenter import free_support_barycenter as free_support_barycenter
    from moe_jax.compression.spec import CompressSpec as CompressSpec
    from moe_jax.conversion.spec import ConvertSpec as ConvertSpec
    from moe_jax.conversion.spec import ExportSpec as ExportSpec
    from moe_jax.core.errors import InputError as InputError
    from moe_jax.evaluation.classification import Classification as Classification
    from moe_jax.evaluation.held_out import Evaluation as Evaluation
    from moe_jax.experts import AdapterBank as AdapterBank
    from moe_jax.experts import AdapterConfig as AdapterConfig
    from moe_jax.experts import BankConfig as BankConfig
    from moe_jax.experts import ExpertBank as ExpertBank
    from moe_jax.experts import FFNConfig as FFNConfig
    from moe_jax.experts import KernelBank as KernelBank
    from moe_jax.experts import LoRAConfig as LoRAConfig
    from moe_jax.experts import make_bank as make_bank
    from moe_jax.functional.position_embeddings import RelativeBiasConfig as RelativeBiasConfig
    from moe_jax.functional.position_embeddings import RopeConfig as RopeConfig
    from moe_jax.functional.routing import route as route
    from moe_jax.generation.spec import GenerateSpec as GenerateSpec
    from moe_jax.models import AttentionConfig as AttentionConfig
    from moe_jax.models import LatentConfig as LatentConfig
    from moe_jax.models import LayerConfig as LayerConfig
    from moe_jax.models import ModelConfig as ModelConfig
    from moe_jax.models import MoEConfig as MoEConfig
    from moe_jax.models.moe_config import PerftConfig as PerftConfig
    from moe_jax.nn import filters as filters
    from moe_jax.nn.decoder import Decoder as Decoder
    from moe_jax.nn.moe import MoE as MoE
    from moe_jax.peft.spec import AdaptSpec as AdaptSpec
    from moe_jax.peft.spec import MergeSpec as MergeSpec
    from moe_jax.planning.model_costs import ModelPlan as ModelPlan
    from moe_jax.training.recipe import Recipe as Recipe
    from moe_jax.upcycling.spec import UpcycleSpec as UpcycleSpec

# The names above, which are not attributes yet.
__all__ = sorted(name for name in globals()["__dir__"]() if not name.startswith("_"))  # pyright: ignore
