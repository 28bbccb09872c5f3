"""MoE-LLaVA and Med-MoE: against a plain program in float64, and through the commands."""

import contextlib
import dataclasses
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.conversion.hf_config import kept_keys, read_hf_config, write_hf_config
from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory, completed_config
from moe_jax.conversion.model_table import mapped, plain_name
from moe_jax.conversion.table import PER_EXPERT
from moe_jax.conversion.vision_formats.elsewhere import NOWHERE, Elsewhere
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import leaf_specs, load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.nn.projector import tokens_per_picture
from tests.support.hf_checkpoints import BASE, assert_same_bits, random_tensors, read_tensors, write_checkpoint
from tests.support.tiers import long, one_in
from tests.vision import plain_moe_llava
from tests.vision.moe_llava_checkpoints import (
    BACKBONES,
    CLIP_LARGE,
    KINDS,
    TOWER,
    Kind,
    config_of,
    random_values,
    shapes_of,
    tower_shapes,
)

PICTURES = np.random.default_rng(3).integers(0, 256, (2, 2, 12, 12, 3), np.uint8)
# One picture in the first row, two in the second one; nine features each.
ROWS = ([5, 9, plain_moe_llava.PICTURE, 33, 2, 60, 17, 4, 8, 12, 40, 41, 3, 7, 50, 51],
        [plain_moe_llava.PICTURE, 6, 7, plain_moe_llava.PICTURE, 63, 11, 20, 21])  # fmt: skip


def with_slots(row: list[int]) -> tuple[list[int], list[int]]:
    """Returns ids with a token for every feature of a picture, and the slots of the features."""
    ids, slots = [], []
    for token in row:
        is_picture = token == plain_moe_llava.PICTURE
        start = max(slots, default=0) + 1
        slots += range(start, start + 9) if is_picture else [0]
        ids += [0] * 9 if is_picture else [token]
    return ids, slots


def written(folder, kind: Kind):
    """Writes a checkpoint without its tower, and that in a directory of its own."""
    config = config_of(kind)
    tensors = random_values(shapes_of(kind, config))
    own = {name: value for name, value in tensors.items() if ".image_tower." not in name}
    tower = folder / "tower"
    tower.mkdir()
    (tower / "config.json").write_text(json.dumps(TOWER))
    start = next(name for name in tensors if ".image_tower." in name).partition("vision_model.")[0]
    save_file({name: tensors[start + name] for name in tower_shapes(TOWER)}, tower / "model.safetensors")
    return write_checkpoint(folder / "model", config, own), tower, config, tensors


@one_in(8, first=1)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_logits(kind, tmp_path, strict_numerics):
    folder, tower, config, tensors = written(tmp_path, kind)
    precise = {name: value.astype(np.float64) for name, value in tensors.items()}
    expected = [
        plain_moe_llava.logits(config, TOWER, precise, row, pictures)
        for row, pictures in zip(ROWS, PICTURES, strict=True)
    ]
    model = load_model(HuggingFaceDirectory(folder, elsewhere=Elsewhere(vision_tower=tower)))
    run = nnx.jit(lambda model, ids, pixels, slots: model(ids, pixels=pixels, slots=slots).logits)
    ids, slots = (jnp.asarray(part) for part in zip(*map(with_slots, ROWS), strict=True))
    got = np.asarray(run(model, ids, jnp.asarray(PICTURES), slots))
    for row, reference in zip(got, expected, strict=True):
        assert np.abs(row - reference).max() <= 2e-5 * np.abs(reference).max()


@one_in(9, first=7)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_it_is_converted_and_leaves_as_it_came(kind, tmp_path, capsys):
    folder, tower, config, tensors = written(tmp_path, kind)
    assert cli.main(["convert", str(folder), str(tmp_path / "ours"), "--vision-tower", str(tower)]) == 0
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert_same_bits(read_tensors(tmp_path / "back"), tensors)
    keys = json.loads((tmp_path / "back" / "config.json").read_text())
    tower_keys = keys.pop("mm_image_tower_config")
    assert {key: tower_keys[key] for key in TOWER} == TOWER
    said = {"meta_moe": True, "gate_bias": True} if kind.form == "med" else {}
    expected = {**config, "moe": config["moe"] | said} if "moe" in config else config
    assert {key: keys[key] for key in expected} == expected
    # It says all of itself now.
    assert cli.main(["convert", str(tmp_path / "back"), str(tmp_path / "again")]) == 0
    first, again = (ModelDirectory(tmp_path / name) for name in ("ours", "again"))
    assert again.config == first.config
    for path in first.specs():
        np.testing.assert_array_equal(again.read(path), first.read(path))


@pytest.mark.parametrize("kind", [KINDS["phi-moe"]], ids=str)
def test_a_tower_and_a_projector_that_are_elsewhere(kind, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    folder, tower, config, tensors = written(tmp_path, kind)
    whole = HuggingFaceDirectory(folder, elsewhere=Elsewhere(vision_tower=tower))
    expected = {path: whole.read(path) for path in whole.specs()}
    projector = {name: value for name, value in tensors.items() if "mm_projector" in name}
    rest = {name: value for name, value in read_tensors(folder).items() if name not in projector}
    # A PyTorch file without them, with the head's bias that Phi has; and a whole CLIP, whose text encoder stays.
    (folder / "model.safetensors").unlink()
    rest["lm_head.bias"] = np.ones(64, np.float32)
    torch.save({name: torch.from_numpy(value) for name, value in rest.items()}, folder / "pytorch_model.bin")
    arguments = ["convert", str(folder), str(tmp_path / "ours"), "--vision-tower", str(tower)]
    assert cli.main(arguments) == 2
    assert "--projector FILE" in capsys.readouterr().err
    file = tmp_path / "mm_projector.bin"
    # As LLaVA names it.
    plain = {name.replace("image_spatial_proj.", ""): torch.from_numpy(value) for name, value in projector.items()}
    torch.save(plain, file)
    vision = {name: value for name, value in read_tensors(tower).items()}
    text = {"text_model.final_layer_norm.weight": np.ones(8, np.float32), "logit_scale": np.ones((), np.float32)}
    write_checkpoint(tower, {"model_type": "clip", "vision_config": TOWER}, vision | text)
    assert cli.main([*arguments, "--projector", str(file)]) == 0
    file.rename(folder / "mm_projector.bin")
    assert cli.main([*arguments[:2], str(tmp_path / "beside"), *arguments[3:]]) == 0
    for name in ("ours", "beside"):
        made = ModelDirectory(tmp_path / name)
        assert made.config == whole.config
        for path, leaf in expected.items():
            np.testing.assert_array_equal(made.read(path), leaf)
    assert cli.main([*arguments[:2], str(tmp_path / "no"), "--vision-tower", str(tmp_path / "no")]) == 2
    assert cli.main([*arguments[:2], str(tmp_path / "no"), *arguments[3:], "--projector", "no.bin"]) == 2
    torch.save({"lm_head.weight": torch.ones(2)}, file)
    assert cli.main([*arguments[:2], str(tmp_path / "no"), *arguments[3:], "--projector", str(file)]) == 2
    assert "no tensors of a projector" in capsys.readouterr().err


REFUSED = {
    "simple": ("image_projector_type", "simple_in0_out1"),
    "qformer": ("image_projector_type", "qformer2_64"),
    "cheap": ("image_projector_type", "cheap_qformer2_64"),
    "video": ("mm_video_tower", "LanguageBind/LanguageBind_Video_merge"),
    "start and end": ("mm_use_im_start_end", True),
    "residual": ("use_residual", True),
    "three experts": ("top_k_experts", 3),
    "aspect": ("image_aspect_ratio", "anyres"),
    "feature": ("mm_vision_select_feature", "cls"),
    "width": ("mm_hidden_size", 1023),
    "layers": ("moe_layers_idx", [0, 9]),
    "unknown": ("router_jitter", 0.1),
    "parallel": ("use_parallel_residual", True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(name):
    config = config_of(KINDS["stablelm-moe"]) | {"mm_image_tower_config": TOWER}
    key, value = REFUSED[name]
    inside = key in config["moe"] or key == "router_jitter"
    changed = {**config, "moe": {**config["moe"], key: value}} if inside else {**config, key: value}
    with pytest.raises(InputError, match=key) as found:
        read_hf_config(changed)
    assert "\n" not in str(found.value)


def test_a_missing_tower_is_asked_for(tmp_path, capsys):
    folder, _, config, _ = written(tmp_path, KINDS["stablelm-moe"])
    run = ["convert", str(folder), str(tmp_path / "ours")]
    assert cli.main(run) == 2
    said = capsys.readouterr().err
    assert "'./a-small-encoder'" in said and "--vision-tower DIR" in said and said.count("\n") == 1
    # Its config alone is not its weights.
    (folder / "config.json").write_text(json.dumps(config | {"mm_image_tower_config": TOWER}))
    assert cli.main(run) == 2
    said = capsys.readouterr().err
    assert "no tensors of its image encoder" in said and "--vision-tower DIR" in said


def test_formats_that_hold_their_towers_take_none(tmp_path, capsys):
    write_checkpoint(tmp_path / "llama", {**BASE, "model_type": "llama"}, {"x": np.zeros(1, np.float32)})
    arguments = ["convert", str(tmp_path / "llama"), str(tmp_path / "ours"), "--vision-tower", str(tmp_path)]
    assert cli.main(arguments) == 2
    assert "--vision-tower" in capsys.readouterr().err


STEPS = {
    "linear": ("linear",),
    "identity": (),
    "mlp1x_gelu": ("linear",),
    "mlp3x_gelu": ("linear", "gelu", "linear", "gelu", "linear"),
    "pool_mlp2x_gelu": ("pool:2", "linear", "gelu", "linear"),
}


@pytest.mark.parametrize("name", STEPS)
def test_projectors(name):
    tower = TOWER | {"image_size": 16, **({"hidden_size": 32} if name == "identity" else {})}
    config = config_of(KINDS["phi-moe"], tower=tower) | {"mm_image_tower_config": tower, "image_projector_type": name}
    read = read_hf_config(config)
    assert read.vision is not None and read.vision.projector == STEPS[name]
    assert write_hf_config(read)["image_projector_type"] == {"linear": "mlp1x_gelu"}.get(name, name)
    made = [tensor for tensor in mapped(read, leaf_specs(read), PER_EXPERT).tensors if "mm_projector" in tensor]
    block = "model.mm_projector.image_spatial_proj"
    places = {"pool_mlp2x_gelu": ["block.0.", "block.2."], "mlp3x_gelu": ["0.", "2.", "4."], "identity": []}
    expected = [f"{block}.{at}{part}" for at in places.get(name, ["0."]) for part in ("weight", "bias")]
    assert made == expected
    # As `linear` has it, and LLaVA.
    others = (f"{block}.weight", "model.mm_projector.weight", "model.mm_projector.0.weight", f"{block}.0.weight")
    assert {plain_name(read, other) for other in others} == {f"{block}.0.weight"}
    towers = ("vision_model.post_layernorm.bias", "post_layernorm.bias")
    (tower,) = {plain_name(read, f"model.image_tower.image_tower.{other}") for other in towers}
    assert tower == "model.image_tower.image_tower.vision_model.post_layernorm.bias"


def test_true_names_and_shapes_of_moe_llava_phi(data_dir):
    """MoE-LLaVA-Phi-2.7B-4e: 4 experts in 16 of 32 layers, and CLIP-L/336."""
    phi = json.loads((data_dir / "configs" / "derived" / "microsoft__phi-2.json").read_text())
    del phi["architectures"]
    config = config_of(KINDS["phi-moe"], phi, CLIP_LARGE)
    model = read_hf_config(config)
    expected = shapes_of(KINDS["phi-moe"], config, CLIP_LARGE)
    assert len(model.moe_layers) == 16 and mapped(model, leaf_specs(model), PER_EXPERT).tensors == expected
    keys = write_hf_config(model)
    assert {key: keys[key] for key in config} == config and "mm_image_tower_config" not in keys


@one_in(9, first=8)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_value_of_a_key_is_a_crash_and_what_is_read_is_written(kind):
    config = config_of(kind) | {"mm_image_tower_config": TOWER}
    values = (None, [], {}, -1, 0, "x", True, [1], [[1]], {"a": 1}, 10**30, 1.5, float("nan"), "../x", [0, 0], ["a"])
    places = [(key,) for key in config]
    places += [(key, inner) for key in ("moe", "mm_image_tower_config") for inner in config.get(key, {})]
    read = 0
    for (key, *inner), value in itertools.product([*places, ("moe", "meta_moe"), ("moe", "gate_bias")], values):
        changed = {**config, key: {**config.get(key, {}), inner[0]: value} if inner else value}
        with contextlib.suppress(InputError):
            model = read_hf_config(completed_config(changed, NOWHERE, ["x.mlp.meta_moe.y"]))
            assert read_hf_config(write_hf_config(model), ignored=kept_keys(model)) == model, (key, inner, value)
            read += 1
    assert 0.1 < read / len(places) / len(values) < 0.9


TOWERS = {
    "openai/clip-vit-large-patch14-336": ("clip_vision_model", 1024, 576),
    "./clip-vit-large-patch14": ("clip_vision_model", 1024, 256),
    "google/siglip-so400m-patch14-384": ("siglip_vision_model", 1152, 728),  # a patch is lost: there is no class token
}


@pytest.mark.parametrize("name", TOWERS)
def test_towers_that_are_known_by_their_names(name):
    family, width, count = TOWERS[name]
    config = config_of(KINDS["qwen-moe"]) | {"mm_image_tower": name, "mm_hidden_size": width}
    model = read_hf_config(config)
    assert model.vision is not None and model.vision.tower.family == family
    assert tokens_per_picture(model.vision, model.d_model) == count
    keys = write_hf_config(model)
    assert {key: keys[key] for key in config} == config and "mm_image_tower_config" not in keys
    # A model that has the encoder from elsewhere names it, too.
    unnamed = dataclasses.replace(model, vision=dataclasses.replace(model.vision, foreign={}))
    expected = name.replace("./", "openai/")
    assert write_hf_config(unnamed)["mm_image_tower"] == expected


@long
@pytest.mark.parametrize("backbone", ["stablelm", "qwen", "phi"])
def test_an_upcycled_model_of_text_leaves_without_a_tower(backbone, tmp_path, capsys, strict_numerics):
    names = {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"} if backbone == "stablelm" else {}
    dense = {names.get(key, key): value for key, value in BACKBONES[backbone].items()} | {"model_type": backbone}
    write_checkpoint(tmp_path / "dense", dense, random_tensors(dense))
    command = ["upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), "--experts", "4", "--layers", "0", "2"]
    assert cli.main([*command, "--delta", "low-rank:2", "--no-step0-check"]) == 0
    code = cli.main(["export", str(tmp_path / "moe"), str(tmp_path / "hf")])
    if backbone == "phi":  # its head has a bias, which the format has not
        assert code == 2 and "head_bias" in capsys.readouterr().err
        return
    assert code == 0
    keys = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert keys["model_type"] == f"moe_llava_{backbone}" and "mm_image_tower" not in keys
    # Evaluation in the published code drops nothing: a device takes all tokens for one expert.
    assert keys["moe"]["eval_capacity_factor"] * 2 >= 4
    tensors = {name: value.astype(np.float64) for name, value in read_tensors(tmp_path / "hf").items()}
    row = [5, 9, 33, 2, 60, 17, 4, 8, 12, 40]
    expected = plain_moe_llava.logits(keys, TOWER, tensors, row, PICTURES[0])
    for name in ("moe", "hf"):
        got = np.asarray(load_model(open_source(tmp_path / name))(jnp.asarray([row])).logits)[0]
        assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()


@long
def test_an_upcycled_llava_of_transformers_leaves_as_moe_llava(tmp_path, capsys, strict_numerics):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.families.reference import saved
    from tests.support.vision_models import SMALL_EYE, random_llava

    source = saved(random_llava("phi", "clip"), tmp_path / "llava")
    vision, side = source.config.vision, SMALL_EYE.patch * SMALL_EYE.side
    assert vision is not None and vision.family == "llava"
    command = ["upcycle", str(source.path), str(tmp_path / "moe"), "--experts", "4", "--every", "2"]
    assert cli.main([*command, "--delta", "sparse:0.5"]) == 0
    assert cli.main(["export", str(tmp_path / "moe"), str(tmp_path / "hf")]) == 0
    keys = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert keys["model_type"] == "moe_llava_phi" and keys["mm_image_tower"] == "clip_vision_model"
    tensors = {name: value.astype(np.float64) for name, value in read_tensors(tmp_path / "hf").items()}
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (1, 1, side, side, 3), np.uint8)
    count = SMALL_EYE.side**2
    before, after = [5, 9, 33], [2, 60, 17, 4]
    row = [*before, plain_moe_llava.PICTURE, *after]
    expected = plain_moe_llava.logits(keys, keys["mm_image_tower_config"], tensors, row, pictures[0])
    ids = jnp.asarray([[*before, *[0] * count, *after]])
    slots = jnp.asarray([[0] * len(before) + list(range(1, count + 1)) + [0] * len(after)])
    for name in ("moe", "hf"):
        model = load_model(open_source(tmp_path / name))
        got = np.asarray(model(ids, pixels=jnp.asarray(pictures), slots=slots).logits)[0]
        assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()
