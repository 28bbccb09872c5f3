"""Parameter-efficient tuning: LoRA, PERFT, and which parameters are trained.

`moe_jax.adapt` adds adapters and `moe_jax.merge` multiplies them in. What is here serves your own training loop:

    trainable_paths                  the parameters that patterns select
    split_model                      `(graphdef, trained, frozen)`
    LoRAConfig, PerftConfig          LoRA beside kernels, and adapters as experts beside an MoE

    >>> from moe_jax.peft import split_model, trainable_paths
    >>> moe = moe_jax.tiny_model(experts=4)
    >>> paths = trainable_paths(moe.decoder, train=["layers/.*/mlp/router/.*"])
    >>> sorted(paths)
    ['stack/segments/0/blocks/0/mlp/router/kernel']
    >>> graphdef, trained, frozen = split_model(moe.decoder, paths)
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from moe_jax.models import LoRAConfig as LoRAConfig
    from moe_jax.models import PerftConfig as PerftConfig
    from moe_jax.peft.trained import split_model as split_model
    from moe_jax.peft.trained import trainable_paths as trainable_paths
