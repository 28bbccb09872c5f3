"""Checkpoints of MoE-LLaVA and Med-MoE, written down from the published code: their configs, names and shapes."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]

# Small ones. The last key is of the tests: the two matrices into Qwen's FFN are counted in one.
_SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
BACKBONES: dict[str, dict[str, Any]] = {
    "stablelm": {
        **_SMALL,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "norm_eps": 1e-5,
        "rope_pct": 0.25,
        "rope_theta": 10000,
        "use_qkv_bias": True,
        "hidden_act": "silu",
    },
    "qwen": {
        **_SMALL,
        "kv_channels": 8,
        "intermediate_size": 96,
        "seq_length": 128,
        "layer_norm_epsilon": 1e-5,
        "rotary_pct": 1.0,
        "rotary_emb_base": 500.0,
        "no_bias": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
    },
    "phi": {
        **_SMALL,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "hidden_act": "gelu_new",
    },
}
TOWER: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 12,
}
CLIP_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 336,
}


class Kind(NamedTuple):
    """What differs between the models: the backbone, and whether it is dense, MoE-LLaVA's or Med-MoE's."""

    backbone: str
    form: str  # dense, moe, med


KINDS = {f"{backbone}-{form}": Kind(backbone, form) for backbone in BACKBONES for form in ("dense", "moe", "med")}


def config_of(kind: Kind, language_model: Config | None = None, tower: Config = TOWER) -> dict[str, Any]:
    """Returns the config.json, which names the image encoder and does not describe it."""
    text = dict(BACKBONES[kind.backbone] if language_model is None else language_model)
    layers = list(range(0, text["num_hidden_layers"], 2))
    moe = {
        "moe_enable": True,
        "train_modules": ["wg"],
        "moe_mode": "sparse",
        "moe_layers_idx": layers,
        "num_experts": [4] * len(layers),
        "ep_size": 1,
        "top_k_experts": 1 if kind.form == "med" else 2,
        "capacity_factor": 1.5,
        "eval_capacity_factor": 2.0,
        "min_capacity": 0,
        "use_residual": False,
        "router_aux_loss_coef": 0.0 if kind.form == "med" else 0.01,
    }
    return {
        **text,
        "model_type": f"{'' if kind.form == 'dense' else 'moe_'}llava_{kind.backbone}",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "mm_image_tower": "openai/clip-vit-large-patch14-336" if tower is CLIP_LARGE else "./a-small-encoder",
        "mm_video_tower": None,
        "mm_hidden_size": tower["hidden_size"],
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False,
        "mm_projector_lr": None,
        "use_mm_proj": True,
        "image_projector_type": "mlp2x_gelu",
        "image_aspect_ratio": "pad",
        "tokenizer_padding_side": "right",
        "tune_mm_mlp_adapter": False,
        "freeze_mm_mlp_adapter": False,
        "video_projector_type": "linear",
        "video_global_proj": False,
        "video_temproal_proj": False,
        "video_spatial_proj": False,
        **({} if kind.form == "dense" else {"moe": moe}),
    }


def shapes_of(kind: Kind, config: Config, tower: Config = TOWER) -> Shapes:
    """Returns the tensors of the whole model, tower and projector included."""
    body = "transformer" if kind.backbone == "qwen" else "model"
    names = {"stablelm": _stablelm, "qwen": _qwen, "phi": _phi}[kind.backbone]
    found = dict(names(config))
    blocks = [name.partition(".mlp.") for name in found if ".mlp." in name]
    of_moe = config.get("moe", {"moe_layers_idx": ()})["moe_layers_idx"]
    d_model = config["hidden_size"]
    for block, _, rest in blocks:
        if int(block.rpartition(".")[2]) not in of_moe:
            continue
        shape, moe = found.pop(f"{block}.mlp.{rest}"), f"{block}.mlp.deepspeed_moe"
        found |= {f"{moe}.gate.wg.weight": (4, d_model)}
        found |= {f"{moe}.experts.deepspeed_experts.{e}.{rest}": shape for e in range(4)}
        if kind.form == "med":
            found |= {f"{block}.mlp.meta_moe.{rest}": shape, f"{moe}.gate.wg.bias": (4,)}
    projector = f"{body}.mm_projector.image_spatial_proj"
    found |= {
        **{f"{projector}.0.weight": (d_model, tower["hidden_size"]), f"{projector}.0.bias": (d_model,)},
        **{f"{projector}.2.weight": (d_model, d_model), f"{projector}.2.bias": (d_model,)},
    }
    return found | {f"{body}.image_tower.image_tower.{name}": shape for name, shape in tower_shapes(tower).items()}


def tower_shapes(tower: Config) -> Shapes:
    """Returns the tensors of CLIP's vision model, as its own checkpoint names them."""
    width, hidden, at = tower["hidden_size"], tower["intermediate_size"], "vision_model"
    patch, count = tower["patch_size"], (tower["image_size"] // tower["patch_size"]) ** 2
    found: Shapes = {
        f"{at}.embeddings.class_embedding": (width,),
        f"{at}.embeddings.patch_embedding.weight": (width, 3, patch, patch),
        f"{at}.embeddings.position_embedding.weight": (count + 1, width),
    }
    norms = ["pre_layrnorm", "post_layernorm"]
    for i in range(tower["num_hidden_layers"]):
        layer = f"encoder.layers.{i}"
        norms += [f"{layer}.layer_norm1", f"{layer}.layer_norm2"]
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= _linear(f"{at}.{layer}.self_attn.{name}", width, width)
        found |= _linear(f"{at}.{layer}.mlp.fc1", width, hidden) | _linear(f"{at}.{layer}.mlp.fc2", hidden, width)
    for name in norms:
        found |= {f"{at}.{name}.weight": (width,), f"{at}.{name}.bias": (width,)}
    return found


def random_values(shapes: Shapes, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws float32 tensors; scales of norms are about 1, and routers decide clearly."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape) / math.sqrt(shape[-1] if len(shape) < 3 else math.prod(shape[1:]))
        is_scale = "norm" in name or ".ln_" in name
        values = 1 + 0.1 * values if is_scale and name.endswith("weight") else values
        made[name] = (3 * values if ".wg." in name else values).astype(np.float32)
    return made


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(name: str, width: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (width,)} | ({f"{name}.bias": (width,)} if bias else {})


def _stablelm(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, f = config["hidden_size"], config["intermediate_size"]
    kv, bias = config["num_key_value_heads"] * d // config["num_attention_heads"], config["use_qkv_bias"]
    yield "model.embed_tokens.weight", (config["vocab_size"], d)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        parts = (
            *(_norm(f"{at}.input_layernorm", d), _norm(f"{at}.post_attention_layernorm", d)),
            *(_linear(f"{at}.self_attn.q_proj", d, d, bias), _linear(f"{at}.self_attn.k_proj", d, kv, bias)),
            *(_linear(f"{at}.self_attn.v_proj", d, kv, bias), _linear(f"{at}.self_attn.o_proj", d, d, False)),
            *(_linear(f"{at}.mlp.gate_proj", d, f, False), _linear(f"{at}.mlp.up_proj", d, f, False)),
            _linear(f"{at}.mlp.down_proj", f, d, False),
        )
        for part in parts:
            yield from part.items()
    yield from _norm("model.norm", d).items()
    yield "lm_head.weight", (config["vocab_size"], d)


def _qwen(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, f = config["hidden_size"], config["intermediate_size"] // 2
    yield "transformer.wte.weight", (config["vocab_size"], d)
    for i in range(config["num_hidden_layers"]):
        at = f"transformer.h.{i}"
        parts = (
            *(_norm(f"{at}.ln_1", d, False), _norm(f"{at}.ln_2", d, False)),
            *(_linear(f"{at}.attn.c_attn", d, 3 * d), _linear(f"{at}.attn.c_proj", d, d, False)),
            *(_linear(f"{at}.mlp.w1", d, f, False), _linear(f"{at}.mlp.w2", d, f, False)),
            _linear(f"{at}.mlp.c_proj", f, d, False),
        )
        for part in parts:
            yield from part.items()
    yield from _norm("transformer.ln_f", d, False).items()
    yield "lm_head.weight", (config["vocab_size"], d)


def _phi(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, f = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], d)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield from _norm(f"{at}.input_layernorm", d).items()
        for name in ("q_proj", "k_proj", "v_proj", "dense"):
            yield from _linear(f"{at}.self_attn.{name}", d, d).items()
        yield from (_linear(f"{at}.mlp.fc1", d, f) | _linear(f"{at}.mlp.fc2", f, d)).items()
    yield from _norm("model.final_layernorm", d).items()
    yield "lm_head.weight", (config["vocab_size"], d)  # and no bias, unlike Phi's own
