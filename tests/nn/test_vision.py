"""Towers against Transformers: every hidden state of random CLIP, SigLIP and DINOv2, also of other sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import path_name
from moe_jax.experts.shapes import FFNConfig
from moe_jax.functional.position_embeddings import RopeConfig
from moe_jax.model_io.loading import disk_paths
from moe_jax.models import AttentionConfig, LayerConfig, ModelConfig, PatchesConfig
from moe_jax.nn.vision import VisionTower
from tests.support.tiers import one_in

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Width, heads, hidden width, layers, side of a patch, patches along a side.
SHAPES = [(32, 4, 64, 3, 4, 5), (24, 2, 96, 1, 7, 3), (48, 6, 96, 4, 2, 4), (16, 1, 48, 2, 5, 6)]
BLOCK = {"q": "q", "k": "k", "v": "v", "o": "out"}


def tower_config(name: str, shape: tuple[int, ...]) -> ModelConfig:
    width, heads, hidden, layers, patch, side = shape
    attention = AttentionConfig(
        num_heads=heads, num_kv_heads=heads, head_dim=width // heads, biases=("q", "k", "v", "o"), mask="bidirectional"
    )
    activation = {"clip": "quick_gelu", "siglip": "gelu_tanh", "dinov2": "gelu"}[name]
    ffn = FFNConfig(dim=hidden, gated=False, activation=activation, bias=True)
    layer = LayerConfig(attention=attention, mlp=ffn, branch_scales=name == "dinov2")
    is_clip = name == "clip"
    patches = PatchesConfig(
        **{"size": patch, "grid": (side, side), "bias": not is_clip, "class_token": name != "siglip"},
        **{"pre_norm": is_clip, "pooled_norm": is_clip},
    )
    return ModelConfig(
        **{"family": name, "vocab_size": 0, "d_model": width, "max_positions": patches.num_positions},
        **{"layers": (layer,) * layers, "rope": RopeConfig(fraction=0.0), "norm": "layer"},
        **{"norm_eps": 1e-5 if is_clip else 1e-6, "final_norm": not is_clip, "patches": patches},
    )


def theirs(name: str, shape: tuple[int, ...]):
    width, heads, hidden, layers, patch, side = shape
    common = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers, "patch_size": patch}
    common |= {"image_size": patch * side, "attn_implementation": "eager"}
    torch.manual_seed(sum(shape))
    if name == "clip":
        made = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(intermediate_size=hidden, **common))
    elif name == "siglip":
        made = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(intermediate_size=hidden, **common))
    else:
        made = transformers.Dinov2Model(transformers.Dinov2Config(mlp_ratio=hidden // width, **common))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return made.eval()


def ours(name: str, shape: tuple[int, ...], model) -> VisionTower:
    """The tower with the weights of Transformers' model."""
    config = tower_config(name, shape)
    tensors = {key.removeprefix("vision_model."): value.numpy() for key, value in model.state_dict().items()}
    if name == "dinov2":
        outer = {
            **{"patches/projection": "embeddings.patch_embeddings.projection", "final_norm": "layernorm"},
            **{"patches/positions": "embeddings.position_embeddings", "patches/class_token": "embeddings.cls_token"},
        }
        stem = "encoder.layer.{i}."
        inner = {f"attention/{one}": f"attention.{one}_proj" for one in "qkvo"}
        inner |= {"attention_norm": "norm1", "mlp_norm": "norm2"}
        inner |= {"mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2"}
        inner |= {"attention_scale": "layer_scale1.lambda1", "mlp_scale": "layer_scale2.lambda1"}
    else:
        outer = {
            **{"patches/projection": "embeddings.patch_embedding", "patches/norm": "pre_layrnorm"},
            **{"patches/positions": "embeddings.position_embedding.weight"},
            **{"patches/class_token": "embeddings.class_embedding"},
            ("pooled_norm" if name == "clip" else "final_norm"): "post_layernorm",
        }
        stem = "encoder.layers.{i}."
        inner = {f"attention/{one}": f"self_attn.{long}_proj" for one, long in BLOCK.items()}
        inner |= {
            "attention_norm": "layer_norm1",
            "mlp_norm": "layer_norm2",
            "mlp/up": "mlp.fc1",
            "mlp/down": "mlp.fc2",
        }

    def tensor_of(leaf: str) -> np.ndarray:
        if leaf.startswith("layers/"):
            _, i, rest = leaf.split("/", 2)
            names = {path: stem.format(i=i) + place for path, place in inner.items()}
        else:
            names, rest = outer, leaf
        if rest in names:
            return np.squeeze(tensors[names[rest]])
        part, _, kind = rest.rpartition("/")
        tensor = tensors[f"{names[part]}.{'bias' if kind == 'bias' else 'weight'}"]
        return tensor.reshape(len(tensor), -1).T if kind == "kernel" else tensor

    graphdef, state = nnx.split(VisionTower(config, rngs=nnx.Rngs(0)))

    def filled(path, leaf):
        leaves = disk_paths(config, path_name(path))
        found = [tensor_of(one) for one in leaves]
        array = np.stack(found) if leaves[0].startswith("layers/") else found[0]
        assert array.shape == leaf.shape, (leaves, array.shape, leaf.shape)
        return jnp.asarray(array)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(filled, state))


@one_in(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["clip", "siglip", "dinov2"])
def test_hidden_states_are_those_of_transformers(name, shape):
    model = theirs(name, shape)
    tower = ours(name, shape, model)
    layers, patch, side = shape[3], shape[4], shape[5]
    # Positions of all are for one size; DINOv2's are interpolated, also to sides that are no multiple of a patch.
    sizes = [(patch * side, patch * side)] + [(patch * side + 2 * patch + 1, patch * (side - 1))] * (name == "dinov2")
    for height, width in sizes:
        pixels = np.random.default_rng(0).normal(size=(2, height, width, 3)).astype(np.float32)
        with torch.no_grad():
            out = model(torch.tensor(np.moveaxis(pixels, -1, 1)), output_hidden_states=True)
        found = jax.jit(lambda x, tower=tower: tower(x, hidden_states=range(layers + 1)))(pixels)
        expected = [state.numpy() for state in out.hidden_states]
        scale = max(np.abs(state).max() for state in expected)
        for index in range(layers):
            np.testing.assert_allclose(found.hidden_states[index], expected[index], atol=2e-5 * scale)
        np.testing.assert_allclose(found.x, out.last_hidden_state.numpy(), atol=2e-5 * scale)


def test_gradients_reach_every_parameter_but_the_norm_of_what_is_pooled():
    tower = VisionTower(tower_config("dinov2", SHAPES[0]), rngs=nnx.Rngs(0))
    pixels = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, 20, 3)), jnp.float32)
    gradients = nnx.grad(lambda tower: jnp.sum(jnp.sin(tower(pixels).x)))(tower)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert jnp.abs(leaf).max() > 0 or "attention/k/bias" in path_name(path), path_name(path)


@pytest.mark.parametrize(
    ("shape", "named"), [((1, 3, 30, 3), "smaller than a patch"), ((1, 8, 8, 4), "pixels"), ((8, 8, 3), "pixels")]
)
def test_pictures_of_another_shape_are_refused(shape, named):
    tower = VisionTower(tower_config("clip", SHAPES[0]), rngs=nnx.Rngs(0))
    with pytest.raises(InputError) as error:
        tower(jnp.zeros(shape))
    assert named in str(error.value)


def test_a_tower_sees_all_and_rotates_nothing():
    config = tower_config("clip", SHAPES[0])
    causal = dataclasses.replace(config.layers[0].attention, mask="causal")
    with pytest.raises(InputError, match="bidirectional"):
        dataclasses.replace(config, layers=(dataclasses.replace(config.layers[0], attention=causal),))
    with pytest.raises(InputError, match="positions"):
        dataclasses.replace(config, patches=dataclasses.replace(config.patches, grid=(3, 3)))
