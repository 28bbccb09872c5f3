"""All configs: frozen dataclasses that describe models, experts and training, without weights.

Build one with keywords, change it with `dataclasses.replace`, and give it to a module (`moe_jax.Decoder`), a bank
(`moe_jax.make_bank`) or a verb. A form of experts may stand wherever its name may: `moe_jax.upcycle(model,
delta=moe_jax.configs.LowRank(rank=16))` is the same as `delta="low-rank:16"`.

    >>> from moe_jax.configs import FFNConfig, MoEConfig
    >>> MoEConfig(expert=FFNConfig(dim=32), num_experts=4, top_k=2).weighting
    'topk_softmax'

Names are imported when they are first asked for: importing this module imports no JAX.

Models:
    ModelConfig, LayerConfig         a model, and one of its layers
    AttentionConfig, LatentConfig    attention, and what makes it latent
    IndexerConfig                    chooses the keys of latent attention
    DeltaRuleConfig                  the gated delta rule, in the place of attention
    ShortConvConfig, Mamba2Config    a gated short convolution, and Mamba-2, in the place of attention
    RecurrentConfig, Carried         any such recurrence, and what its cache holds
    RopeConfig, RelativeBiasConfig   position embeddings
    QueryScaleConfig                 factors of queries that grow with their positions
    FFNConfig, MoEConfig             a feed-forward network, and a Mixture-of-Experts
    SelectionConfig                  restricts the choice of experts
    AdapterConfig, LoRAConfig, PerftConfig
                                     adapters, LoRA, and adapters as experts
    VisionConfig, PatchesConfig, ImageProcessing
                                     what a model sees with, its patches, and the pixels of a picture
    config_to_json, config_from_json
                                     a model's config as a table of JSON, and back

Experts:
    BankConfig, BaseCodes            the form of the experts, and codes of their base
    LinearCodes                      codes of linear maps outside the experts
    Full, LowRank, JointLowRank, Sparse, Quantized, MixtureOfBases, AdapterExperts
                                     the forms

Training:
    Recipe                           a whole run, in sections:
    ModelSection, PartitionSection   the model, and which of its parameters are trained
    DataSection, SourceSection, FieldsSection
                                     the data, its files, and the keys of their rows
    OptimizerSection, GroupSection, ScheduleSection, TrainSection
                                     optimizer, parameters with their own options, learning rate, steps
    EmaSection, DistillSection       an average of parameters, a teacher
    MoESection, MTPSection           balance among experts, and layers that predict tokens after the next
    MeshSection                      devices
    CheckpointSection, LogSection, EvalSection
                                     what is written, and what is measured
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from moe_jax.data.sections import DataSection as DataSection
    from moe_jax.data.sections import FieldsSection as FieldsSection
    from moe_jax.data.sections import SourceSection as SourceSection
    from moe_jax.experts import AdapterExperts as AdapterExperts
    from moe_jax.experts import BankConfig as BankConfig
    from moe_jax.experts import BaseCodes as BaseCodes
    from moe_jax.experts.forms import Full as Full
    from moe_jax.experts.forms import JointLowRank as JointLowRank
    from moe_jax.experts.forms import LowRank as LowRank
    from moe_jax.experts.forms import MixtureOfBases as MixtureOfBases
    from moe_jax.experts.forms import Quantized as Quantized
    from moe_jax.experts.forms import Sparse as Sparse
    from moe_jax.models import AdapterConfig as AdapterConfig
    from moe_jax.models import AttentionConfig as AttentionConfig
    from moe_jax.models import Carried as Carried
    from moe_jax.models import DeltaRuleConfig as DeltaRuleConfig
    from moe_jax.models import FFNConfig as FFNConfig
    from moe_jax.models import ImageProcessing as ImageProcessing
    from moe_jax.models import IndexerConfig as IndexerConfig
    from moe_jax.models import LatentConfig as LatentConfig
    from moe_jax.models import LayerConfig as LayerConfig
    from moe_jax.models import LinearCodes as LinearCodes
    from moe_jax.models import LoRAConfig as LoRAConfig
    from moe_jax.models import Mamba2Config as Mamba2Config
    from moe_jax.models import ModelConfig as ModelConfig
    from moe_jax.models import MoEConfig as MoEConfig
    from moe_jax.models import PatchesConfig as PatchesConfig
    from moe_jax.models import PerftConfig as PerftConfig
    from moe_jax.models import QueryScaleConfig as QueryScaleConfig
    from moe_jax.models import RecurrentConfig as RecurrentConfig
    from moe_jax.models import RelativeBiasConfig as RelativeBiasConfig
    from moe_jax.models import RopeConfig as RopeConfig
    from moe_jax.models import SelectionConfig as SelectionConfig
    from moe_jax.models import ShortConvConfig as ShortConvConfig
    from moe_jax.models import VisionConfig as VisionConfig
    from moe_jax.models import config_from_json as config_from_json
    from moe_jax.models import config_to_json as config_to_json
    from moe_jax.training.balance.moe_section import MoESection as MoESection
    from moe_jax.training.recipe import CheckpointSection as CheckpointSection
    from moe_jax.training.recipe import DistillSection as DistillSection
    from moe_jax.training.recipe import EmaSection as EmaSection
    from moe_jax.training.recipe import EvalSection as EvalSection
    from moe_jax.training.recipe import GroupSection as GroupSection
    from moe_jax.training.recipe import LogSection as LogSection
    from moe_jax.training.recipe import MeshSection as MeshSection
    from moe_jax.training.recipe import ModelSection as ModelSection
    from moe_jax.training.recipe import MTPSection as MTPSection
    from moe_jax.training.recipe import OptimizerSection as OptimizerSection
    from moe_jax.training.recipe import PartitionSection as PartitionSection
    from moe_jax.training.recipe import Recipe as Recipe
    from moe_jax.training.recipe import ScheduleSection as ScheduleSection
    from moe_jax.training.recipe import TrainSection as TrainSection
