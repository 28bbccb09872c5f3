"""MoE-LLaVA and Med-MoE in NumPy, in float64: one row of text and pictures, tensors by their foreign names.

Written from the published code, but for one thing: the second expert is the second best, and not drawn.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import erf

Config = Mapping[str, Any]
Tensors = Mapping[str, np.ndarray]
PICTURE = -200  # stands in a row for all features of the next picture

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def logits(config: Config, tower: Config, tensors: Tensors, row: Sequence[int], pixels: np.ndarray) -> np.ndarray:
    """Float64[T, V] of a row of ids, in which `PICTURE` stands for pictures UInt8[M, S, S, 3] in turn."""
    body = "transformer" if config["model_type"].endswith("qwen") else "model"
    words = tensors[f"{body}.{'wte' if body == 'transformer' else 'embed_tokens'}.weight"]
    pictures = iter(pixels)
    pieces = [
        features(config, tower, tensors, next(pictures), body) if token == PICTURE else words[[token]] for token in row
    ]
    x = np.concatenate(pieces)
    decoder = {"stablelm": _stablelm, "qwen": _qwen, "phi": _phi}[config["model_type"].rpartition("_")[2]]
    return decoder(config, tensors, x) @ tensors["lm_head.weight"].T


def features(config: Config, tower: Config, tensors: Tensors, picture: np.ndarray, body: str) -> np.ndarray:
    """Float64[n, d] of a picture UInt8[S, S, 3]."""
    at, eps = f"{body}.image_tower.image_tower.vision_model", 1e-5
    side, heads = tower["patch_size"], tower["num_attention_heads"]
    pixels = (picture / 255.0 - np.asarray(MEAN)) / np.asarray(STD)
    n = picture.shape[0] // side
    patches = pixels.reshape(n, side, n, side, 3).transpose(0, 2, 4, 1, 3).reshape(n * n, -1)
    kernel = tensors[f"{at}.embeddings.patch_embedding.weight"]
    x = np.concatenate([tensors[f"{at}.embeddings.class_embedding"][None], patches @ kernel.reshape(len(kernel), -1).T])
    x = x + tensors[f"{at}.embeddings.position_embedding.weight"]
    states = [x := _layer_norm(tensors, f"{at}.pre_layrnorm", x, eps)]
    for i in range(tower["num_hidden_layers"]):
        layer = f"{at}.encoder.layers.{i}"
        y = _layer_norm(tensors, f"{layer}.layer_norm1", x, eps)
        q, k, v = (_linear(tensors, f"{layer}.self_attn.{name}_proj", y).reshape(len(y), heads, -1) for name in "qkv")
        x = x + _linear(tensors, f"{layer}.self_attn.out_proj", _attend(q, k, v, causal=False))
        y = _linear(tensors, f"{layer}.mlp.fc1", _layer_norm(tensors, f"{layer}.layer_norm2", x, eps))
        x = x + _linear(tensors, f"{layer}.mlp.fc2", y / (1 + np.exp(-1.702 * y)))
        states.append(x)
    x = states[config["mm_vision_select_layer"]]
    x = x[1:] if config["mm_vision_select_feature"] == "patch" else x
    projector = f"{body}.mm_projector.image_spatial_proj"
    hidden = _linear(tensors, f"{projector}.0", x)
    return _linear(tensors, f"{projector}.2", hidden * (1 + erf(hidden / math.sqrt(2))) / 2)


# --- the language models --------------------------------------------------------------------------


def _stablelm(config: Config, tensors: Tensors, x: np.ndarray) -> np.ndarray:
    heads, kv_heads, eps = config["num_attention_heads"], config["num_key_value_heads"], config["norm_eps"]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        y = _layer_norm(tensors, f"{at}.input_layernorm", x, eps)
        q, k, v = (
            _linear(tensors, f"{at}.self_attn.{name}_proj", y).reshape(len(y), count, -1)
            for name, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
        )
        q, k = (_rotated(one, config["rope_pct"], config["rope_theta"]) for one in (q, k))
        k, v = (np.repeat(one, heads // kv_heads, axis=1) for one in (k, v))
        x = x + _linear(tensors, f"{at}.self_attn.o_proj", _attend(q, k, v, causal=True))
        x = x + _mlp(tensors, f"{at}.mlp", _layer_norm(tensors, f"{at}.post_attention_layernorm", x, eps), _gated)
    return _layer_norm(tensors, "model.norm", x, eps)


def _gated(tensors: Tensors, at: str, x: np.ndarray) -> np.ndarray:
    gate = _linear(tensors, f"{at}.gate_proj", x)
    return _linear(tensors, f"{at}.down_proj", gate / (1 + np.exp(-gate)) * _linear(tensors, f"{at}.up_proj", x))


def _qwen(config: Config, tensors: Tensors, x: np.ndarray) -> np.ndarray:
    heads, eps = config["num_attention_heads"], config["layer_norm_epsilon"]
    for i in range(config["num_hidden_layers"]):
        at = f"transformer.h.{i}"
        joined = _linear(tensors, f"{at}.attn.c_attn", _rms_norm(tensors, f"{at}.ln_1", x, eps))
        q, k, v = (part.reshape(len(x), heads, -1) for part in np.split(joined, 3, axis=-1))
        q, k = (_rotated(one, config["rotary_pct"], config["rotary_emb_base"]) for one in (q, k))
        x = x + _linear(tensors, f"{at}.attn.c_proj", _attend(q, k, v, causal=True))
        x = x + _mlp(tensors, f"{at}.mlp", _rms_norm(tensors, f"{at}.ln_2", x, eps), _gated_qwen)
    return _rms_norm(tensors, "transformer.ln_f", x, eps)


def _gated_qwen(tensors: Tensors, at: str, x: np.ndarray) -> np.ndarray:
    gate = _linear(tensors, f"{at}.w2", x)
    return _linear(tensors, f"{at}.c_proj", _linear(tensors, f"{at}.w1", x) * gate / (1 + np.exp(-gate)))


def _phi(config: Config, tensors: Tensors, x: np.ndarray) -> np.ndarray:
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        y = _layer_norm(tensors, f"{at}.input_layernorm", x, eps)
        q, k, v = (_linear(tensors, f"{at}.self_attn.{name}_proj", y).reshape(len(y), heads, -1) for name in "qkv")
        q, k = (_rotated(one, config["partial_rotary_factor"], config["rope_theta"]) for one in (q, k))
        x = x + _linear(tensors, f"{at}.self_attn.dense", _attend(q, k, v, causal=True)) + _mlp(
            tensors, f"{at}.mlp", y, _plain
        )  # fmt: skip
    return _layer_norm(tensors, "model.final_layernorm", x, eps)


def _plain(tensors: Tensors, at: str, x: np.ndarray) -> np.ndarray:
    y = _linear(tensors, f"{at}.fc1", x)
    y = y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))) / 2
    return _linear(tensors, f"{at}.fc2", y)


# --- what they share ------------------------------------------------------------------------------


def _mlp(tensors: Tensors, at: str, x: np.ndarray, ffn: Callable[[Tensors, str, np.ndarray], np.ndarray]) -> np.ndarray:
    """The FFN of a dense layer; or the MoE, of one expert and a universal FFN in Med-MoE, and of two in MoE-LLaVA."""
    gate = f"{at}.deepspeed_moe.gate.wg"
    if f"{gate}.weight" not in tensors:
        return ffn(tensors, at, x)
    scores = _linear(tensors, gate, x)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    is_med = any(name.startswith(f"{at}.meta_moe.") for name in tensors)
    y = ffn(tensors, f"{at}.meta_moe", x) if is_med else np.zeros_like(x)
    for t, row in enumerate(p):
        best = np.argsort(-row)[: 1 if is_med else 2]
        total = 1.0 if is_med else row[best].sum()
        for e in best:
            expert = f"{at}.deepspeed_moe.experts.deepspeed_experts.{e}"
            y[t] += row[e] / total * ffn(tensors, expert, x[t : t + 1])[0]
    return y


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool) -> np.ndarray:
    length = len(q)
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf) if causal else scores
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", shares, v).reshape(length, -1)


def _rotated(x: np.ndarray, share: float, base: float) -> np.ndarray:
    width = int(x.shape[-1] * share)
    angles = np.arange(len(x))[:, None] / base ** (np.arange(0, width, 2) / width)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _layer_norm(tensors: Tensors, at: str, x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps)
    return scaled * tensors[f"{at}.weight"] + tensors[f"{at}.bias"]


def _rms_norm(tensors: Tensors, at: str, x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * tensors[f"{at}.weight"]


def _linear(tensors: Tensors, at: str, x: np.ndarray) -> np.ndarray:
    y = x @ tensors[f"{at}.weight"].T
    return y + tensors[f"{at}.bias"] if f"{at}.bias" in tensors else y
