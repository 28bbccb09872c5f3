"""Texts around the placeholders of a picture: those that the processors of Transformers write, once each."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from moe_jax.data.pictures.picture_sources import ANY_PICTURE
from moe_jax.data.rows import Example
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.models.serialize import config_from_json, config_to_json
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import dense_config
from tests.support.seeing_models import FEATURES, seeing

SMOL = ("<fake_token_around_image><global-img>", "<fake_token_around_image>")
# Frame, and the model's own token for a picture.
KINDS = {"smolvlm": (SMOL, "<image>"), "internvl": (("<img>", "</img>"), "<IMG_CONTEXT>")}


@pytest.fixture(params=KINDS)
def framed(request, tmp_path):
    """A tokenizer over bytes that knows the tokens of a format, and another, of the same model without frame."""
    frame, own = KINDS[request.param]
    names = [own, "<img>", "</img>", "<fake_token_around_image>", "<global-img>"]
    file = byte_tokenizer(tmp_path / "tokenizer.json")
    plain = tokenizers.Tokenizer.from_file(str(file))
    plain.add_special_tokens(names)
    plain.save(str(file))
    config = seeing(dense_config(vocab_size=300), placeholder=plain.token_to_id(own))
    assert config.vision is not None
    with_frame = dataclasses.replace(config, vision=dataclasses.replace(config.vision, frame=frame))
    assert config_from_json(config_to_json(with_frame)) == with_frame
    return request.param, Tokenizer(file, with_frame), Tokenizer(file, config)


def theirs(kind: str) -> str:
    """What the processor of Transformers writes for a picture of one tile."""
    transformers = pytest.importorskip("transformers")
    if kind == "smolvlm":
        return transformers.models.smolvlm.processing_smolvlm.get_image_prompt_string(
            0, 0, FEATURES, "<fake_token_around_image>", "<image>", "<global-img>"
        )
    processor = SimpleNamespace(
        start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>", image_seq_length=FEATURES
    )
    write = transformers.models.internvl.processing_internvl.InternVLProcessor.replace_image_token
    return write(processor, {"num_patches": [1]}, 0)


def test_a_picture_is_framed_as_by_transformers(framed):
    kind, tokenizer, plain = framed
    (before, after), own = KINDS[kind]
    expected = plain.encode(f"a{theirs(kind)}b{theirs(kind)}").tolist()
    for text in ("a<image>b<image>", f"a{own}b<image>", f"a{before}{own}{after}b{own}"):
        (made,) = tokenizer.documents([Example(text, begins=False, ends=False, pictures=(ANY_PICTURE,) * 2)])
        assert made.ids.tolist() == expected
        ids = tokenizer.encode(text, pictures=True).tolist()
        assert ids == plain.encode(f"a{before}{own}{after}b{before}{own}{after}").tolist()
    # What holds a placeholder for every feature is left as it is.
    assert tokenizer.encode(f"a{theirs(kind)}", pictures=True).tolist() == plain.encode(f"a{theirs(kind)}").tolist()


def test_what_is_scored_does_not_move(framed):
    _, tokenizer, plain = framed
    text = "q<image>? yes"
    example = Example(text, spans=((9, len(text)),), pictures=(ANY_PICTURE,))
    (made,), (other,) = tokenizer.documents([example]), plain.documents([example])
    assert made.scored.sum() == other.scored.sum() == 4
    assert np.array_equal(made.ids[made.scored > 0], list(b" yes"))


def test_what_frames_a_picture_is_not_scored(framed):
    kind, tokenizer, _ = framed
    (before, after), own = KINDS[kind]
    for text in ("<image>cap", f"{before}{own}{after}cap", f"a{own}<image>cap"):
        pictures = (ANY_PICTURE,) * (1 + text.startswith("a"))
        (made,) = tokenizer.documents([Example(text, begins=False, ends=False, pictures=pictures)])
        assert bytes(made.ids[made.scored > 0].astype(np.uint8)) == text.encode()[: len(pictures) - 1] + b"cap"
