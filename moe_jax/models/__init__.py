"""Configs: complete descriptions of models, without weights."""

from moe_jax.experts.bank_config import BankConfig as BankConfig
from moe_jax.experts.shapes import AdapterConfig as AdapterConfig
from moe_jax.experts.shapes import FFNConfig as FFNConfig
from moe_jax.experts.shapes import LoRAConfig as LoRAConfig
from moe_jax.functional.position_embeddings import RelativeBiasConfig as RelativeBiasConfig
from moe_jax.functional.position_embeddings import RopeConfig as RopeConfig
from moe_jax.images.image_config import ImageProcessing as ImageProcessing
from moe_jax.images.image_config import PatchesConfig as PatchesConfig
from moe_jax.models.attention_config import AttentionConfig as AttentionConfig
from moe_jax.models.attention_config import IndexerConfig as IndexerConfig
from moe_jax.models.attention_config import LatentConfig as LatentConfig
from moe_jax.models.config import LayerConfig as LayerConfig
from moe_jax.models.config import ModelConfig as ModelConfig
from moe_jax.models.config import Segment as Segment
from moe_jax.models.config import VisionConfig as VisionConfig
from moe_jax.models.config import segments_of as segments_of
from moe_jax.models.config import single_layers as single_layers
from moe_jax.models.moe_config import MoEConfig as MoEConfig
from moe_jax.models.moe_config import PerftConfig as PerftConfig
from moe_jax.models.moe_config import SelectionConfig as SelectionConfig
from moe_jax.models.recurrent_config import DeltaRuleConfig as DeltaRuleConfig
from moe_jax.models.recurrent_config import Mamba2Config as Mamba2Config
from moe_jax.models.recurrent_config import RecurrentConfig as RecurrentConfig
from moe_jax.models.recurrent_config import ShortConvConfig as ShortConvConfig
from moe_jax.models.serialize import config_from_json as config_from_json
from moe_jax.models.serialize import config_to_json as config_to_json
