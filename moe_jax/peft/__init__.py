"""Parameter-efficient tuning: PERFT, LoRA, and the partition into trained and frozen parameters."""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from moe_jax.peft.partition import split_model as split_model
    from moe_jax.peft.partition import trainable_paths as trainable_paths
