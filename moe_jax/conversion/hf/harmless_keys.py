"""Keys of a Hugging Face config.json that do not change what a model computes, in any family.

All other keys are read by a family's reader, or listed as harmless by the family, or an error: an unknown key may well
change what the model computes.
"""

from typing import Any

# Where a file came from, how it is stored, and how Transformers runs it.
_STORAGE = (
    "architectures", "auto_map", "custom_pipelines", "dtype", "framework", "model_max_length", "model_name",
    "model_type", "name_or_path", "quantization_config", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers_version", "transformers_weights", "transformers.js_config", "use_bfloat16", "use_cache",
    "use_flash_attention", "use_flash_attn", "use_mem_eff_path",
)  # fmt: skip
# Training: initial values, dropout (which our training applies to adapters alone), losses and their outputs.
_TRAINING = (
    "attention_dropout", "attn_pdrop", "embd_pdrop", "ffn_dropout_rate", "gradient_checkpointing", "hidden_dropout",
    "initializer_factor", "initializer_range", "loss_type", "output_router_logits", "resid_pdrop", "resid_dropout",
    "router_jitter_noise", "embedding_dropout", "residual_dropout",
)  # fmt: skip
# Outputs of Transformers, and the same product cut in pieces.
_OUTPUTS = (
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "pretraining_tp", "return_dict",
    "return_dict_in_generate", "output_scores", "use_return_dict",
)  # fmt: skip
# Special tokens that no forward pass uses, labels of other tasks.
_TASK = (
    "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id", "bos_token_id", "eos_token_id",
    "decoder_start_token_id", "classifier_dropout", "finetuning_task", "id2label", "label2id", "num_labels",
    "problem_type", "task_specific_params", "prefix", "is_llama_config",
)  # fmt: skip
# Generation: releases of Transformers before 4.25 kept it here.
_GENERATION = (
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "remove_invalid_values", "repetition_penalty", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p",
)  # fmt: skip
_HARMLESS = frozenset((*_STORAGE, *_TRAINING, *_OUTPUTS, *_TASK, *_GENERATION))
# Notes that Transformers and fine-tuning tools keep for themselves.
_PREFIXES = ("_", "unsloth_")

# Keys that have no effect as long as they have this value.
_UNUSED: dict[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
}


def is_harmless(key: str, value: Any) -> bool:
    """Whether a key with this value has no effect on what a model of any family computes."""
    return key in _HARMLESS or key.startswith(_PREFIXES) or (key in _UNUSED and value == _UNUSED[key])
