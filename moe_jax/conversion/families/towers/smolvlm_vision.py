"""The image encoder of SmolVLM: SigLIP's, without its head.

The n-th patch of a side has the n-th position. The code of Transformers looks for it by a rounded fraction of the side,
and so finds that of a neighbour for some patches of some grids, such as 25 x 25; which ones depends on the processor.
On those of published models, 27 x 27 and 32 x 32, it finds the same.
"""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.towers.clip_siglip_dinov2 import SIGLIP
from moe_jax.conversion.families.towers.usual_tower import HALF, read_tower, squashed, tower_ffn
from moe_jax.models import ModelConfig


def _read(keys: HFConfig) -> ModelConfig:
    return read_tower(keys, "smolvlm_vision", tower_ffn(keys), bias=True)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {key: value for key, value in SIGLIP.write(config).items() if key != "vision_use_head"}


SMOLVLM_VISION = Family(
    name="smolvlm_vision",
    architecture="SmolVLMVisionTransformer",
    defaults={**SIGLIP.defaults, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
    read=_read,
    write=_write,
    table=SIGLIP.table,
    shapes=SIGLIP.shapes,
    processing=lambda side: squashed(side, HALF, HALF, resample="lanczos"),
)
