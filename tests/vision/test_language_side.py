"""Verbs of the language side on a model that sees, and a step of training behind each: what is left of the eye."""

import hashlib
import io
import json

import numpy as np
import pytest
from PIL import Image

import moe_jax
from moe_jax.model_io.loading import load_model, model_leaves
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves
from tests.support.environment import ROOT
from tests.support.moe_models import MemorySource
from tests.support.numerics import logits_of
from tests.support.seeing_models import picture_batch, seeing
from tests.support.tiers import long

CONFIG = seeing(dense_config(num_layers=1, vocab_size=258))
STEP = {"train": {"steps": 1}, "optimizer": {"learning_rate": 1e-2}}


@pytest.fixture(scope="module")
def dense() -> moe_jax.Model:
    return moe_jax.Model(load_model(MemorySource(CONFIG, random_leaves(CONFIG))))


@pytest.fixture(scope="module")
def moe(dense) -> moe_jax.Model:
    return upcycled(dense)


def upcycled(dense: moe_jax.Model, **options) -> moe_jax.Model:
    return moe_jax.upcycle(dense, experts=4, every=1, step0_check=False, **options)


def batch() -> dict[str, np.ndarray]:
    return picture_batch(CONFIG, 24, (2, 12), (5,))


def digests(model: moe_jax.Model, part: str) -> dict[str, str]:
    """SHA-256 of the leaves of a part of the eye."""
    leaves = {path: np.asarray(leaf) for path, leaf in model_leaves(model.decoder) if path.startswith(f"vision/{part}")}
    assert leaves
    return {path: hashlib.sha256(leaf.tobytes()).hexdigest() for path, leaf in leaves.items()}


def check_eye(made: moe_jax.Model, before: moe_jax.Model, *, projector_learns: bool) -> None:
    assert digests(made, "tower/") == digests(before, "tower/")
    found, expected = digests(made, "projector/"), digests(before, "projector/")
    if projector_learns:  # all of it
        assert found.keys() == expected.keys() and not set(found.values()) & set(expected.values())
    else:
        assert found == expected


MADE = {
    "vanilla": {},
    "ders-lm": {"delta": "low-rank:2"},
    "ders-sm": {"delta": "sparse:0.9"},
    "med": {"universal": "med"},
    "extended": {"delta": "low-rank:2", "extended": True, "universal": "med"},
}


@long
@pytest.mark.parametrize("name", MADE)
def test_upcycled_and_trained_on_pictures(dense, name):
    made = upcycled(dense, **MADE[name])
    check_eye(made, dense, projector_learns=False)
    trained = moe_jax.train(STEP, made, [batch()])
    check_eye(trained, dense, projector_learns=True)
    frozen = moe_jax.train(STEP | {"partition": {"freeze": ["vision/projector/.*"]}}, made, [batch()])
    check_eye(frozen, dense, projector_learns=False)


ADAPTERS = {
    "perft-r": {"method": "perft-r", "adapter": "lora:2", "experts": 2, "top_k": 1},
    "perft-e": {"method": "perft-e", "adapter": "lora:2"},
    "lora": {"method": "lora", "adapter": "lora:2", "targets": "q,v"},
}


@long
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapted_and_trained_on_pictures(moe, name):
    """The model that adapters stand beside is frozen, and the projector is a part of it."""
    made = moe_jax.train(STEP, moe_jax.adapt(moe, **ADAPTERS[name]), [batch()])
    check_eye(made, moe, projector_learns=False)
    if name == "lora":
        merged = moe_jax.merge(made)
        check_eye(merged, moe, projector_learns=False)
        given = [batch()[key] for key in ("tokens", "pixels", "slots")]
        logits = [
            logits_of(one.decoder, given[0], pixels=given[1], slots=given[2]) for one in (made, merged)
        ]  # fmt: skip
        np.testing.assert_allclose(*logits, atol=1e-4)


def png(number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (15, 20, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def saved(moe, tmp_path_factory):
    """A folder with the model, its tokenizer, and pairs about two pictures."""
    folder = tmp_path_factory.mktemp("saved")
    moe_jax.save(moe, folder / "moe")
    byte_tokenizer(folder / "moe" / "tokenizer.json")
    rows = [{"image": f"{n}.png", "prompt": "<image>What is it? ", "response": "It is the one."} for n in range(2)]
    for number in range(2):
        (folder / f"{number}.png").write_bytes(png(number))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@long
def test_compressed_with_pictures_and_recovered_from_what_it_was(moe, saved):
    small = moe_jax.compress(saved / "moe", method="quantize", bits=2, calibrate=saved / "rows.jsonl")
    check_eye(small, moe, projector_learns=False)
    seen = []
    made = moe_jax.train(
        ROOT / "train" / "recipes" / "recover_router.toml",
        small,
        [batch()],
        overrides=[
            f'distill.teacher="{saved / "moe"}"',
            "train.steps=1",
            "train.batch_size=2",
            "schedule.warmup_steps=0",
        ],
        on_step=seen.append,
    )
    # The recipe trains routers and norms, and those of the eye are none of them.
    check_eye(made, moe, projector_learns=False)
    assert seen[0]["distill_loss"] > 0
    leaves = [dict(model_leaves(one.decoder)) for one in (small, made)]
    changed = {path for path in leaves[0] if not np.array_equal(*(np.asarray(one[path]) for one in leaves))}
    assert changed == {path for path in leaves[0] if "/router/" in path or "norm/" in path and "vision" not in path}


def test_a_teacher_sees_the_pictures(moe, saved):
    """A student that is its teacher diverges from it by nothing, as both look at the same."""
    recipe = STEP | {"distill": {"teacher": str(saved / "moe")}}
    seen = []
    made = moe_jax.train(recipe, moe, [batch()], on_step=seen.append)
    assert abs(seen[0]["distill_loss"]) < 1e-6
    check_eye(made, moe, projector_learns=True)
