"""Generation with pictures: the same from Python and from the command line, and what is refused."""

import base64
import io
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data.chat_template import check_messages
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.generation.pictures import see_prompts
from moe_jax.serve.asked_pictures import PictureReader
from moe_jax.serve.prompts import PromptReader
from moe_jax.serve.protocol_error import ProtocolError
from tests.support.byte_tokenizer import byte_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.tiers import long  # noqa: E402
from tests.support.vision_models import made, normalised, random_llava  # noqa: E402

IMAGE = 258  # after the 256 bytes, <s> and </s>


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A checkpoint over bytes, whose tokenizer knows `<image>`; and two pictures."""
    import tokenizers

    folder = tmp_path_factory.mktemp("generate")
    model = random_llava("llama", of_text={"vocab_size": 259, "eos_token_id": None}, image_token_index=IMAGE)
    made(model).save_pretrained(folder / "llava")
    file = byte_tokenizer(folder / "llava" / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<image>"])
    assert tokenizer.token_to_id("<image>") == IMAGE
    tokenizer.save(str(file))
    for name, seed in (("a.png", 0), ("b.png", 1)):
        drawn = np.random.default_rng(seed).integers(0, 256, (13, 21, 3), np.uint8)
        Image.fromarray(drawn).save(folder / name)
    return folder


def run(words: list, capsys) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main([str(word) for word in words])
    return (code, *capsys.readouterr())


def test_the_command_and_python_say_the_same(folder, capsys):
    a, b = folder / "a.png", folder / "b.png"
    texts = ["<image> and", "no picture", "<image><image>\nthen"]
    words = [word for text in texts for word in ("--prompt", text)]
    images = [word for file in (b, a, b) for word in ("--image", file)]
    code, out, err = run(["generate", folder / "llava", *words, *images, "--max-new-tokens", 6, "--json"], capsys)
    assert code == 0, err
    found = json.loads(out)
    model = moe_jax.load(folder / "llava")
    pixels = np.asarray(Image.open(b).convert("RGB"))
    expected = moe_jax.generate(model, texts, max_new_tokens=6, image=[pixels, a, b])
    assert [one["ids"] for one in found] == [one.ids for one in expected]
    assert found[0]["prompt_ids"].count(IMAGE) == 4 and found[2]["prompt_ids"].count(IMAGE) == 8
    alone, swapped = (moe_jax.generate(model, texts[2], max_new_tokens=6, image=images) for images in ([a, b], [b, a]))
    assert alone.ids == expected[2].ids != swapped.ids  # each picture is read in its place


def test_what_leaves_has_the_processor_of_transformers(folder, tmp_path):
    """It writes as many placeholders into a text as we do, and makes the same pixels."""
    moe_jax.convert(folder / "llava", tmp_path / "ours")
    moe_jax.export(tmp_path / "ours", tmp_path / "hf")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "hf")
    text, picture = "<image> and <image>", Image.open(folder / "a.png")
    theirs = processor(images=[picture, picture], text=text, return_tensors="np")
    config = moe_jax.load(tmp_path / "hf").config
    ids = Tokenizer(tmp_path / "hf" / "tokenizer.json", config).encode(text).tolist()
    rows, pictures = see_prompts(config, [ids], [folder / "a.png"] * 2)
    assert rows == theirs["input_ids"].tolist()
    assert pictures is not None and config.vision is not None
    ours = normalised(list(pictures.pixels[0]), config.vision.processing.mean, config.vision.processing.std)
    np.testing.assert_allclose(ours, theirs["pixel_values"], atol=1e-6)


@pytest.mark.parametrize(
    ("text", "images", "named"),
    [
        ("no place", ["a.png"], "placeholders"),
        ("<image>", [], "placeholders"),
        ("<image><image>", ["a.png"], "placeholders"),
        ("<image>", ["none.png"], "none.png"),
        ("<image>", ["llava/config.json"], "not a picture"),
        ("<image>", ["llava"], "a directory"),
    ],
)
def test_bad_pictures_are_refused_in_one_line(folder, capsys, text, images, named):
    given = [word for name in images for word in ("--image", folder / name)]
    code, out, err = run(["generate", folder / "llava", "--prompt", text, *given], capsys)
    said = err.strip().splitlines()
    assert (code, out, len(said)) == (2, "", 1) and named in said[0] and "Traceback" not in err


def test_a_model_without_vision_takes_no_picture(tiny_checkpoint, folder, capsys):
    code, _, err = run(["generate", tiny_checkpoint, "--prompt", "a", "--image", folder / "a.png"], capsys)
    assert code == 2 and "has no vision" in err and len(err.strip().splitlines()) == 1


def test_a_conversation_takes_no_picture(folder, capsys):
    code, _, err = run(["generate", folder / "llava", "--chat", "--image", folder / "a.png"], capsys)
    assert code == 2 and "--image" in err and len(err.strip().splitlines()) == 1


TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def chatting(folder) -> pathlib.Path:
    """The same checkpoint, with a chat template that takes parts."""
    (folder / "llava" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@long
def test_messages_show_pictures(chatting, capsys, monkeypatch):
    """As parts, at marks, by the command's options, in files of prompts and in a conversation: all are one prompt."""
    model, a = moe_jax.load(chatting / "llava"), chatting / "a.png"
    how = {"max_new_tokens": 4}
    expected = moe_jax.generate(model, "u:<image>what?a:", image=a, **how)
    data = f"data:image/png;base64,{base64.b64encode(a.read_bytes()).decode()}"
    for value in (a, str(a), np.asarray(Image.open(a)), data, {"url": data}):
        parts = [{"type": "image_url" if value is data else "image", "image": value}, {"type": "text", "text": "what?"}]
        assert moe_jax.generate(model, [{"role": "user", "content": parts}], **how) == expected
    marked = [{"role": "user", "content": "<image>what?"}]
    assert moe_jax.generate(model, marked, image=a, **how) == expected
    words = ["generate", chatting / "llava", "--chat", "--max-new-tokens", 4]
    code, out, err = run([*words, "--prompt", "what?", "--image", a, "--json"], capsys)
    assert code == 0, err
    assert json.loads(out)[0]["ids"] == expected.ids
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    (chatting / "asked.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}) + "\n")
    code, out, err = run([*words, "--prompts-file", chatting / "asked.jsonl", "--json"], capsys)
    assert code == 0 and json.loads(out)[0]["prompt_ids"] == expected.prompt_ids
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {chatting / 'none.png'}\n/image {a}\nwhat?\n/exit\n"))
    code, out, err = run(words, capsys)
    assert (code, out.rstrip("\n")) == (0, expected.text)
    assert "none.png" in err and "21 x 13, 4 tokens" in err


@pytest.mark.parametrize(
    ("content", "image", "named"),
    [
        ([{"type": "image", "image": "a.png"}], ["a.png"], "not both"),
        ([{"type": "image"}], [], "holds nothing"),
        ([{"type": "image", "image": "https://x.org/a.png"}], [], "not from elsewhere"),
        ("<image><image>", ["a.png"], "placeholders"),
    ],
)
def test_wrong_messages(chatting, content, image, named):
    with pytest.raises(InputError, match=named):
        images = [chatting / name for name in image]
        moe_jax.generate(chatting / "llava", [{"role": "user", "content": content}], image=images)


def test_names_in_a_file_of_prompts_stay_in_its_folder(chatting, capsys):
    (chatting / "inside").mkdir()
    part = {"type": "image", "image": "../a.png"}
    file = chatting / "inside" / "asked.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": [part]}]}))
    code, _, err = run(["generate", chatting / "llava", "--prompts-file", file], capsys)
    assert code == 2 and "asked.jsonl, line 1" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image"])
def test_pictures_in_messages_are_refused_by_name(kind):
    content = [{"type": "text", "text": "a"}, {"type": kind, kind: "x"}]
    with pytest.raises(InputError, match="picture"):
        check_messages([{"role": "user", "content": content}])


def test_prompts_with_a_place_for_a_picture_are_not_served(folder):
    config = moe_jax.load(folder / "llava").config
    tokenizer = Tokenizer(folder / "llava" / "tokenizer.json", config)
    reader = PromptReader(tokenizer, vocab_size=config.vocab_size, context=64, sees=PictureReader(config))
    for prompt in ("see <image>", [1, IMAGE]):
        with pytest.raises(ProtocolError) as error:
            reader.of(prompt)
        assert error.value.status == 400 and str(IMAGE) in str(error.value)
    assert reader.of("see nothing").ids == list(b"see nothing")


@pytest.mark.parametrize("wrong", [np.zeros((4, 4, 3)), np.zeros((4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)])
def test_wrong_arrays(folder, wrong):
    with pytest.raises(InputError, match=r"uint8\[H, W, 3\]"):
        moe_jax.generate(folder / "llava", "<image>", image=[wrong])


@pytest.mark.parametrize("wrong", [3, Image.new("L", (4, 4)), {"a": 1}])
def test_what_is_no_picture_is_named(folder, wrong):
    with pytest.raises(InputError, match="picture"):
        moe_jax.generate(folder / "llava", "<image>", image=wrong)


def test_of_several_frames_the_first_is_taken_and_a_line_says_so(folder, capsys):
    frames = [Image.open(folder / name) for name in ("a.png", "b.png")]
    moving, still = folder / "moving.webp", folder / "still.webp"
    frames[0].save(moving, save_all=True, append_images=frames[1:], lossless=True)
    frames[0].save(still, lossless=True)
    words = ["generate", folder / "llava", "--prompt", "<image> and", "--max-new-tokens", 4, "--image"]
    first, one = run([*words, moving], capsys), run([*words, still], capsys)
    assert first[:2] == one[:2] and first[0] == 0
    notes = [line for line in first[2].splitlines() if str(moving) in line]
    assert len(notes) == 1 and notes[0].startswith("moe-jax: note: ") and str(still) not in one[2]
