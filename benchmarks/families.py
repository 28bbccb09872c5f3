"""A small model of every family through all commands: converted, exported, trained, upcycled, compressed, tuned.

    python benchmarks/families.py DATA [--only FAMILY ...] [--steps 40] [--out benchmarks/results]

DATA is a folder with `weights/stories260K/hf`, whose tokenizer all models have, and `text/tinystories`. Models have 4
layers of width 64, and the weights that Transformers draws; those of families that Transformers lacks are drawn by this
library. Everything is done with the commands that a user would type, and what they write is loaded in Transformers,
where there is such a class, and compared. OUT receives `families.json`.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

import moe_jax
from evidence.commands import refusal, run, write_recipe
from evidence.layouts import FAMILIES_COMPRESSED, FAMILIES_CONVERTED, FAMILIES_UPCYCLED
from evidence.results import RESULTS, Figures
from moe_jax.conversion import HuggingFaceDirectory, read_hf_config
from moe_jax.conversion.families import family_named
from moe_jax.model_io.loading import load_model

BASE = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
_DELTA_RULE = dict(
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"] * 2,
)  # fmt: skip
_SHORT_CONVOLUTIONS = dict(layer_types=["conv", "full_attention"] * 2, pad_token_id=0)
# Of few heads, several keys have a score of exactly 0, and which of those are chosen is anyone's guess.
_INDEXED = dict(index_n_heads=16, index_head_dim=16, index_topk=64)
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen": dict(kv_channels=16, seq_length=256, intermediate_size=192),
    "qwen2": {},
    "qwen3": dict(head_dim=32),
    "gemma": dict(head_dim=16),
    "gemma2": dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=64),
    "gemma3_text": dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=64),
    "stablelm": dict(use_parallel_residual=True, qk_layernorm=True),
    "phi": {},
    "phi3": dict(pad_token_id=0),
    "olmo2": {},
    "olmo3": dict(sliding_window=64),
    "smollm3": dict(no_rope_layers=[1, 1, 1, 0], pad_token_id=0),
    "glm4": dict(head_dim=16, partial_rotary_factor=0.5, pad_token_id=0),
    "cohere2": dict(sliding_window=64, logit_scale=1.0, pad_token_id=0),
    "qwen3_5_text": dict(_DELTA_RULE),
    "lfm2": dict(_SHORT_CONVOLUTIONS, block_auto_adjust_ff_dim=False),
    "granite": dict(embedding_multiplier=4.0, residual_multiplier=0.5, attention_multiplier=0.25),
}
_EXPERTS = dict(num_experts_per_tok=4, moe_intermediate_size=48)
_LATENT = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4)
_SHARED = dict(n_routed_experts=16, n_shared_experts=1, n_group=1, topk_group=1)
MOE: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2),
    "olmoe": dict(num_experts=16, num_experts_per_tok=4),
    "qwen2_moe": dict(_EXPERTS, num_experts=16, shared_expert_intermediate_size=96),
    "qwen3_moe": dict(_EXPERTS, head_dim=32, num_experts=16, norm_topk_prob=True, mlp_only_layers=[0]),
    "deepseek": dict(_EXPERTS, n_routed_experts=16, n_shared_experts=2, first_k_dense_replace=1),
    "deepseek_v2": dict(_EXPERTS, **_LATENT, n_routed_experts=16, n_shared_experts=2, q_lora_rank=None),
    "deepseek_v3": dict(
        _EXPERTS, **_LATENT, n_routed_experts=16, n_shared_experts=1, q_lora_rank=24, n_group=4, topk_group=2,
        first_k_dense_replace=1,
    ),
    "kimi_k2": dict(
        _EXPERTS, **_LATENT, n_routed_experts=16, n_shared_experts=1, q_lora_rank=24, n_group=1, topk_group=1,
        first_k_dense_replace=1, norm_topk_prob=True,
    ),
    "glm4_moe": dict(_EXPERTS, **_SHARED, head_dim=16, partial_rotary_factor=0.5, first_k_dense_replace=1),
    "glm4_moe_lite": dict(
        _EXPERTS, **_LATENT, **_SHARED, q_lora_rank=24, mlp_layer_types=["dense", *["sparse"] * 3]
    ),
    "solar_open": dict(_EXPERTS, **_SHARED, head_dim=16),
    "exaone_moe": dict(
        _EXPERTS, num_experts=16, num_shared_experts=1, n_group=1, topk_group=1, sliding_window=64,
        mlp_layer_types=["dense", *["sparse"] * 3],
    ),
    "afmoe": dict(_EXPERTS, num_experts=16, num_shared_experts=1, num_dense_layers=1, head_dim=16, sliding_window=64),
    "hunyuan_v1_moe": dict(num_experts=16, moe_topk=4, head_dim=16),
    "phimoe": dict(num_local_experts=16, num_experts_per_tok=2),
    "cohere2_moe": dict(
        num_experts=16, num_experts_per_tok=4, head_dim=16, sliding_window=64, logit_scale=1.0, pad_token_id=0
    ),
    "dots1": dict(_EXPERTS, **_SHARED, first_k_dense_replace=1),
    "ernie4_5_moe": dict(
        moe_num_experts=16, moe_k=4, moe_intermediate_size=48, moe_num_shared_experts=1, moe_layer_start_index=1,
        moe_layer_end_index=3, moe_layer_interval=1,
    ),
    "minimax_m2": dict(num_local_experts=16, num_experts_per_tok=4, head_dim=16, rotary_dim=8),
    "granitemoe": dict(num_local_experts=16, num_experts_per_tok=4),
    "granitemoeshared": dict(num_local_experts=16, num_experts_per_tok=4, shared_intermediate_size=48),
    "flex_olmo": dict(num_experts=8, num_experts_per_tok=4, pad_token_id=0),
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=2, head_dim=16, sliding_window=64, rope_scaling=None),
    "qwen3_next": dict(_EXPERTS, **_DELTA_RULE, num_experts=16, shared_expert_intermediate_size=48),
    "qwen3_5_moe_text": dict(_EXPERTS, **_DELTA_RULE, num_experts=16, shared_expert_intermediate_size=48),
    "lfm2_moe": dict(_EXPERTS, **_SHORT_CONVOLUTIONS, num_experts=16, num_dense_layers=1),
    "granitemoehybrid": dict(
        num_local_experts=16, num_experts_per_tok=4, shared_intermediate_size=48, mamba_n_heads=8, mamba_d_head=16,
        mamba_d_state=16, mamba_n_groups=1, layer_types=["mamba", "attention"] * 2, pad_token_id=0,
    ),
    "nemotron_h": dict(
        _EXPERTS, n_routed_experts=16, moe_shared_expert_intermediate_size=48, head_dim=16, mamba_num_heads=8,
        mamba_head_dim=16, ssm_state_size=16, n_groups=2, pad_token_id=0,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
    ),
    "deepseek_v32": dict(
        _EXPERTS, **_LATENT, **_INDEXED, n_routed_experts=16, n_shared_experts=1, q_lora_rank=24, n_group=4,
        topk_group=2, first_k_dense_replace=1,
    ),
    "glm_moe_dsa": dict(_EXPERTS, **_LATENT, **_SHARED, **_INDEXED, q_lora_rank=24),
    "mistral4": dict(_EXPERTS, **_LATENT, n_routed_experts=16, n_shared_experts=1, q_lora_rank=24),
    "llama4_text": dict(
        num_local_experts=16, num_experts_per_tok=1, head_dim=16, intermediate_size_mlp=192, attention_chunk_size=32,
        floor_scale=32, interleave_moe_layer_step=2, pad_token_id=0,
    ),
    "gemma4_text": dict(
        enable_moe_block=True, num_experts=16, top_k_experts=4, moe_intermediate_size=48, head_dim=16,
        global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=64,
        hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}  # fmt: skip
# Of the MoEs that a family's format knows, where that is not the usual one.
GATES = {"lfm2": ("--gate", "topk_sigmoid")}
SEQ_LEN = 128


class Trial:
    """One family, in a folder of its own."""

    def __init__(self, family: str, keys: dict[str, Any], folder: Path, data: Path, steps: int):
        self.family, self.folder, self.steps = family, folder, steps
        self.keys = {**BASE, **keys}
        if family == "qwen":  # its heads share no keys, and its config has no word for it
            del self.keys["num_key_value_heads"]
        text = (data / "text" / "tinystories" / "tinystories_sample_2MiB.txt").read_text()
        (folder / "train.txt").write_text(text[:400_000])
        (folder / "held-out.txt").write_text(text[400_000:430_000])
        self.recipe = write_recipe(
            folder / "recipe.toml",
            folder / "train.txt",
            seq_len=SEQ_LEN,
            learning_rate=3e-3,
            warmup_steps=5,
            steps=steps,
        )
        self.foreign = folder / "foreign"
        self._draw()
        shutil.copy(data / "weights" / "stories260K" / "hf" / "tokenizer.json", self.foreign)

    def _draw(self) -> None:
        torch.manual_seed(0)
        kind = getattr(transformers, family_named(self.family).architecture, None)
        if self.family in transformers.CONFIG_MAPPING and kind is not None:
            config = transformers.AutoConfig.for_model(self.family, **self.keys)
            kind(config).save_pretrained(self.foreign)
        else:
            config = read_hf_config({"model_type": self.family, **self.keys})
            moe_jax.export(moe_jax.Model(moe_jax.Decoder(config, rngs=nnx.Rngs(0))), self.foreign)

    def loss(self, model: Path) -> float:
        """Held-out loss in nats per token."""
        words = ("eval", model, "--text", self.folder / "held-out.txt", "--seq-len", SEQ_LEN, "--json")
        return json.loads(run(*words))["nll"]

    def train(self, model: Path, name: str, steps: int) -> Path:
        """The model after some steps."""
        run_dir = self.folder / name
        run("train", self.recipe, "--set", f"model.path={model}", f"run_dir={run_dir}", f"train.steps={steps}")
        return run_dir / "model"

    def difference(self, exported: Path) -> str:
        """The largest difference of our logits to those of Transformers, relative to the largest logit."""
        architecture = json.loads((exported / "config.json").read_text())["architectures"][0]
        if not hasattr(transformers, architecture):
            return "no such class"
        kind = getattr(transformers, architecture)
        # A Kimi-K2 is a DeepSeek-V3 that says another name, by which Transformers does not find the names of experts.
        config = kind.config_class.from_pretrained(exported)
        config.model_type = kind.config_class.model_type
        model, report = kind.from_pretrained(
            exported, config=config, output_loading_info=True, attn_implementation="eager"
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        tokens = np.random.default_rng(0).integers(0, self.keys["vocab_size"], (2, 100))
        with torch.no_grad():
            theirs = model.float().eval()(torch.tensor(tokens)).logits.numpy()
        ours = np.asarray(load_model(HuggingFaceDirectory(exported))(jnp.asarray(tokens, jnp.int32)).logits)
        return f"{architecture}, {np.abs(ours - theirs).max() / np.abs(theirs).max():.0e}"

    def export(self, model: Path, name: str) -> str:
        """Exports; what Transformers says of the result, or why there is none."""
        target = self.folder / name
        why = refusal("export", model, target)
        # Without its advice, and without the name of a folder that is gone.
        return self.difference(target) if why is None else why.partition(";")[0].replace(str(model), "it")


def measure_conversion(trial: Trial, figures: Figures) -> Path:
    """Converts, exports and trains; returns the trained model."""
    model = trial.folder / "model"
    run("convert", trial.foreign, model)
    run("export", model, trial.folder / "back")
    same = _tensors(trial.folder / "back") == _tensors(trial.foreign)
    trained = trial.train(model, "run", trial.steps)
    cells = ["yes" if same else "no", trial.loss(model), trial.loss(trained), trial.export(trained, "trained")]
    figures.put_row(FAMILIES_CONVERTED.name, trial.family, [trial.family, *cells])
    return trained


def _tensors(folder: Path) -> dict[str, bytes]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.tobytes() for file in files for name, tensor in load_file(file).items()}


def measure_upcycling(trial: Trial, dense: Path, figures: Figures) -> None:
    """DeRS and PESC from a trained dense model."""
    ways = {
        "DeRS, low-rank:4": (
            "--experts",
            4,
            "--top-k",
            2,
            "--every",
            2,
            "--delta",
            "low-rank:4",
            *GATES.get(trial.family, ()),
        ),
        "PESC, QLoRA": ("--method", "pesc", "--experts", 4, "--top-k", 2, "--adapter", 8, "--rest", "qlora:4"),
    }
    before = trial.loss(dense)
    for index, (way, words) in enumerate(ways.items()):
        model = trial.folder / f"upcycled{index}"
        run("upcycle", dense, model, *words)
        measured = json.loads((model / "lineage.json").read_text())[-1]["measured"]
        trained = trial.train(model, f"upcycled-run{index}", trial.steps // 2)
        cells = [measured["step0_max_abs_difference"], before, trial.loss(trained)]
        exported = trial.export(trained, f"upcycled-export{index}")
        figures.put_row(FAMILIES_UPCYCLED.name, f"{trial.family}, {way}", [trial.family, way, *cells, exported])


def measure_compression(trial: Trial, moe: Path, figures: Figures) -> None:
    """ResMoE and DeRS compression; and PERFT."""
    ways = {
        "ResMoE, up, keep 0.5": ("--method", "resmoe", "--keep", 0.5),
        "DeRS, 4 bits": ("--method", "ders-quantize", "--bits", 4),
    }
    before = trial.loss(moe)
    for index, (way, words) in enumerate(ways.items()):
        small = trial.folder / f"small{index}"
        run("compress", moe, small, *words)
        size = sum(file.stat().st_size for file in (small / "params").rglob("*") if file.is_file())
        whole = sum(file.stat().st_size for file in (moe / "params").rglob("*") if file.is_file())
        cells = [size / whole, before, trial.loss(small), trial.export(small, f"small-export{index}")]
        figures.put_row(FAMILIES_COMPRESSED.name, f"{trial.family}, {way}", [trial.family, way, *cells])
    tuned = trial.folder / "tuned"
    run("adapt", moe, tuned, "--method", "perft-r", "--experts", 4, "--top-k", 2, "--adapter", "lora:4")
    after = trial.loss(trial.train(tuned, "tuned-run", trial.steps // 2))
    cells = [trial.family, "PERFT-R", None, before, after, trial.export(tuned, "tuned-export")]
    figures.put_row(FAMILIES_COMPRESSED.name, f"{trial.family}, PERFT-R", cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*DENSE, *MOE], default=[*DENSE, *MOE], metavar="FAMILY")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("families", options.out, writes=True)
    for family in options.only:
        with tempfile.TemporaryDirectory() as name:
            trial = Trial(family, (DENSE | MOE)[family], Path(name), options.data, options.steps)
            trained = measure_conversion(trial, figures)
            if family in DENSE:
                measure_upcycling(trial, trained, figures)
            else:
                measure_compression(trial, trained, figures)
    for table in (FAMILIES_CONVERTED, FAMILIES_UPCYCLED, FAMILIES_COMPRESSED):
        print(table.text(figures), end="\n\n")


if __name__ == "__main__":
    main()
