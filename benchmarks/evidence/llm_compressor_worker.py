"""GPTQ and AWQ by llm-compressor; run by the Python that has it, which is not this project's.

    PYTHON llm_compressor_worker.py MODEL TARGET < REQUEST > ANSWER

MODEL is a Hugging Face directory of Llama's or Mixtral's form with a tokenizer, TARGET is written. REQUEST is JSON:
`windows`, lists of tokens of one length to calibrate with; `group_size`; `method`, `gptq` (if it is not there) or
`awq`. All linear layers get codes of 4 bits but the head and routers, with zero points for AWQ; all else is by default:
every expert is calibrated with all tokens. ANSWER has a line of JSON among what it says: `versions`.
"""

import json
import sys
from importlib.metadata import version


def main() -> None:
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.conversion_mappings import set_save_conversion_mapping
    from llmcompressor.modeling.moe.linearize import load_quantizable_moe
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import WeightRenaming

    source, target = sys.argv[1:]
    request = json.load(sys.stdin)
    with load_quantizable_moe():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if not torch.accelerator.is_available():
        # AWQ pins what it keeps to memory for transfers to a GPU, which torch refuses where there is none.
        IntermediatesCache.pin_memory = lambda *given, **options: None
    uses_awq = request.get("method") == "awq"
    weights = {"num_bits": 4, "type": "int", "symmetric": not uses_awq, "strategy": "group"}
    codes = {
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights | {"group_size": request["group_size"]}},
        },
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }
    recipe = [AWQModifier(), QuantizationModifier(**codes)] if uses_awq else GPTQModifier(**codes)
    windows = request["windows"]
    data = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(window) for window in windows]})
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        max_seq_length=len(windows[0]),
        num_calibration_samples=len(windows),
        shuffle_calibration_samples=False,
    )
    if model.config.model_type == "mixtral":
        # It knows no names for Mixtral's experts one by one, and would write others than Mixtral's checkpoints have.
        names = [
            WeightRenaming(rf"\.experts\.(\d+)\.{theirs}\.", rf".experts.\1.{ours}_proj.")
            for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
        ]
        set_save_conversion_mapping(model, [WeightRenaming(".block_sparse_moe.", ".mlp."), *names])
    model.save_pretrained(target, save_compressed=True)
    versions = {name: version(name) for name in ("llmcompressor", "compressed-tensors", "transformers", "torch")}
    print("\n" + json.dumps({"versions": versions}), flush=True)


if __name__ == "__main__":
    main()
