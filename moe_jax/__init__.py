"""Mixture-of-Experts from dense models: upcycle, tune, compress; experts share one base.

What is listed here is the public API; anything else may change without notice. Names are imported when they are
first asked for: `import moe_jax` alone does not import JAX. `help(moe_jax.load)` and so on say more of each.

Models:
    load, save              a model read from a path, or written as a model directory
    Model                   a decoder with its tokenizer and its lineage
    Decoder                 the NNX module, from tokens to logits
    tiny_model              a model of some thousand random weights, to try things on

Verbs, for a model or the path of one; without `out` the result is in memory:
    convert, export         from a Hugging Face checkpoint or a GGUF file, and to one
    upcycle                 an MoE made of a dense model, with the same logits
    attach                  an image encoder put before a language model, which then takes pictures
    adapt, merge            adapters put beside a frozen model, and folded into its kernels
    train                   a whole run from a recipe, or a model trained on batches in memory
    compress                the experts of a trained MoE made smaller
    compress_experts        the experts of one layer made smaller: arrays in, a bank out
    generate                prompts continued
    evaluate, classify      the perplexity of a text, and how often labels are right
    plan                    parameters, bytes and FLOP, from a config alone

Options of verbs as one object, in the place of keywords:
    ConvertSpec, ExportSpec, AttachSpec, UpcycleSpec, AdaptSpec, MergeSpec, CompressSpec, GenerateSpec
    Recipe                  of a training run

Results beside models:
    Continuation            of `generate`
    Evaluation              of `evaluate`
    Classification          of `classify`
    CompressedExperts       of `compress_experts`
    ModelPlan               of `plan`
    InputError              for bad input, with what to do; where a path leads nowhere it is a FileNotFoundError

Configs, which describe models without weights:
    ModelConfig             a whole model
    LayerConfig             a layer: attention, then an FFN or an MoE
    AttentionConfig         grouped-query attention
    LatentConfig            what makes it multi-head latent attention
    IndexerConfig           chooses the keys of latent attention
    DeltaRuleConfig         the gated delta rule, in the place of attention
    ShortConvConfig         a gated short convolution, in the place of attention
    Mamba2Config            Mamba-2, in the place of attention
    RopeConfig              rotary position embeddings
    RelativeBiasConfig      relative biases of attention
    QueryScaleConfig        factors of queries that grow with their positions
    FFNConfig               a feed-forward network, or one expert
    MoEConfig               a Mixture-of-Experts: experts, routing, auxiliary losses
    BankConfig              the form of the experts, and of the base that they share
    AdapterConfig           a bottleneck adapter
    LoRAConfig              LoRA beside some kernels
    PerftConfig             adapters as experts beside an MoE

To build with:
    MoE                     the layer: a router and a bank of experts
    make_bank               makes a bank of experts
    ExpertBank              all experts of a layer behind one interface
    KernelBank              experts with whole kernels, or with a base and a part of their own
    AdapterBank             adapters after a shared FFN
    route                   chooses experts for every token
    filters                 parameters by what they are for: of routers, experts, adapters
    free_support_barycenter, Barycenter
                            the barycenter of point clouds, by which experts are aligned

Namespaces, each with an index of its own:
    nn                      Flax NNX modules
    experts                 banks of experts and their forms; `experts.forms` for a form of your own
    functional              pure functions of arrays
    configs                 all configs, those of recipes too
    peft                    the partition of a model into trained and frozen parameters
    training                the step of `train`, and a recipe's optimizer and batches, for a loop by hand
    upcycling               the parts of `upcycle`
    compression             methods, reports and sweeps of `compress`
    typing                  types for annotations
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
    from moe_jax import training as training
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
    from moe_jax.api.transforms import attach as attach
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
    from moe_jax.functional.position_embeddings import QueryScaleConfig as QueryScaleConfig
    from moe_jax.functional.position_embeddings import RelativeBiasConfig as RelativeBiasConfig
    from moe_jax.functional.position_embeddings import RopeConfig as RopeConfig
    from moe_jax.functional.routing.route import route as route
    from moe_jax.generation.spec import GenerateSpec as GenerateSpec
    from moe_jax.models import AttentionConfig as AttentionConfig
    from moe_jax.models import DeltaRuleConfig as DeltaRuleConfig
    from moe_jax.models import IndexerConfig as IndexerConfig
    from moe_jax.models import LatentConfig as LatentConfig
    from moe_jax.models import LayerConfig as LayerConfig
    from moe_jax.models import Mamba2Config as Mamba2Config
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
    from moe_jax.upcycling.attach_spec import AttachSpec as AttachSpec
    from moe_jax.upcycling.spec import UpcycleSpec as UpcycleSpec


class _StarNames(list[str]):
    """The names that `from moe_jax import *` brings.

    `help` asks of each whether it is among them, to describe it in full: in thousands of lines, where the docstring
    above has one for each.
    """

    def __contains__(self, name: object) -> bool:
        return False


# The names above, which are not attributes yet.
__all__ = _StarNames(sorted(set(globals()["__dir__"]()) - set(globals())))  # pyright: ignore


def __dir__() -> list[str]:
    """Returns the public names, and not the packages behind them that were imported meanwhile."""
    return [*__all__, "__all__", "__version__"]
