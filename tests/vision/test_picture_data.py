"""Pictures in the data of a recipe: forms of rows, rows of batches, bad pictures, and where a run goes on."""

import base64
import json
import random
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data.chat_template import load_chat_template
from moe_jax.data.pictures.picture_messages import with_pictures
from moe_jax.data.pictures.picture_sources import ANY_PICTURE
from moe_jax.data.pipeline import open_data
from moe_jax.data.rows import RowReader
from moe_jax.data.sections import DataSection, FieldsSection, SourceSection
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.images import pixel_cache
from moe_jax.images.decoding import decode_picture
from moe_jax.images.processing import pixels_of
from moe_jax.models.serialize import config_to_json
from tests.support.byte_tokenizer import EOS, byte_tokenizer
from tests.support.dense_models import dense_config
from tests.support.drawn_pictures import picture_shop, png
from tests.support.seeing_models import FEATURES, seeing

CONFIG = seeing(dense_config(vocab_size=258))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with eight pictures, and a tokenizer."""
    return picture_shop(tmp_path_factory.mktemp("pictures"))


def llava(number: int, question="<image>\nq", answer="abc", **more) -> dict:
    said = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": number, "image": f"shop/{number}.png", "conversations": said, **more}


def write(path, rows, *, as_list=False):
    text = json.dumps(rows) if as_list else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text)
    return path


def opened(folder, path, *, config=CONFIG, batch_size=2, note=lambda line: None, fields=None, **options):
    given = {"seq_len": 64, "prefetch": 0, "shuffle": False, "epochs": 1, "chat_template": "llava-plain", **options}
    section = DataSection(
        sources=(SourceSection(path=str(path), fields=fields),), **{"image_folder": str(folder), **given}
    )
    rows = range(batch_size)
    return open_data(section, config, folder / "tokenizer.json", seed=0, batch_size=batch_size, rows=rows, note=note)


def read_all(iterator):
    batches = []
    while (batch := next(iterator))["segment_ids"].any():
        batches.append(batch)
    return batches


def seen_in(batches) -> list[tuple[bytes, str]]:
    """Of every document of the batches: the pixels of its picture, and its text."""
    found = []
    for batch in batches:
        for row, segments in enumerate(batch["segment_ids"]):
            for segment in range(1, segments.max() + 1):
                inside = segments == segment
                slots, tokens = batch["slots"][row][inside], batch["tokens"][row][inside]
                pictures = sorted({(slot - 1) // FEATURES for slot in slots[slots > 0].tolist()})
                first = slots[slots > 0] - 1
                assert first.tolist() == [p * FEATURES + f for p in pictures for f in range(FEATURES)]
                assert batch["positions"][row][inside].tolist() == list(range(inside.sum()))
                pixels = b"".join(batch["pixels"][row, picture].tobytes() for picture in pictures)
                found.append((pixels, bytes(tokens[slots == 0].tolist()).decode()))
    return found


def expected(numbers, text="abc") -> list[tuple[bytes, str]]:
    processing = CONFIG.vision.processing
    return [(pixels_of(decode_picture(png(n), "x"), processing).tobytes(), text) for n in numbers]


def data_url(number: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(number)).decode()}"


FORMS = {
    "names": lambda n: llava(n),
    "a list": lambda n: llava(n) | {"image": [f"shop/{n}.png"]},
    "base64": lambda n: llava(n) | {"image": base64.b64encode(png(n)).decode()},
    "a data URL": lambda n: llava(n) | {"image": data_url(n)},
    "messages": lambda n: {
        "images": [f"shop/{n}.png"],
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "abc"}]},
        ],
    },
    "messages with their own": lambda n: {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "q"},
                    {"type": "image_url", "image_url": {"url": data_url(n)}},
                ],
            },
            {"role": "assistant", "content": "abc"},
        ],
    },
    "a pair": lambda n: {"image": f"shop/{n}.png", "prompt": "<image>", "response": "abc\n"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_rows(folder, tmp_path, form):
    path = write(tmp_path / "a.json", [FORMS[form](n) for n in range(8)], as_list=form == "names")
    assert sorted(seen_in(read_all(opened(folder, path)))) == sorted(expected(range(8)))


def test_parquet_with_bytes_and_paths(folder, tmp_path):
    rows = [llava(n) | {"image": {"bytes": png(n) if n % 2 else None, "path": f"shop/{n}.png"}} for n in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert sorted(seen_in(read_all(opened(folder, tmp_path / "a.parquet")))) == sorted(expected(range(8)))


def test_fields_say_which_key_has_the_picture(folder, tmp_path):
    rows = [{"photo": f"shop/{n}.png", "q": "<image>", "a": "abc\n", "image": 3} for n in range(8)]
    fields = FieldsSection(prompt="q", response="a", image="photo")
    path = write(tmp_path / "a.jsonl", rows)
    assert sorted(seen_in(read_all(opened(folder, path, fields=fields)))) == sorted(expected(range(8)))


def test_without_a_folder_names_are_beside_the_file(folder, tmp_path):
    shutil.copytree(folder / "shop", tmp_path / "shop")
    path = write(tmp_path / "a.jsonl", [llava(n) for n in range(8)])
    assert len(seen_in(read_all(opened(folder, path, image_folder=None)))) == 8


@pytest.mark.parametrize("seq_len", [FEATURES + 3, 30, 64])
def test_documents_with_pictures_are_never_cut(folder, tmp_path, seq_len):
    rows = [llava(n, answer="ab" * (1 + n % 2) + str(n)) for n in range(8)]
    batches = read_all(opened(folder, write(tmp_path / "a.jsonl", rows), seq_len=seq_len, packing="split"))
    longest = seq_len + 1 - FEATURES
    texts = [(row["conversations"][1]["value"] + "\n")[:longest][: seq_len - FEATURES] for row in rows]
    assert sorted(text.rstrip("\n") for _, text in seen_in(batches)) == sorted(text.rstrip("\n") for text in texts)


def test_pictures_and_texts_in_one_row(folder, tmp_path):
    text = {"text": "only words"}
    path = write(tmp_path / "a.jsonl", [llava(0), text, llava(1), text, llava(2), llava(3)])
    (batch,) = read_all(opened(folder, path, batch_size=1, seq_len=66, packing="whole"))
    found = seen_in([batch])
    # The last token of a text is only predicted.
    assert [text for _, text in found] == ["abc", "only word", "abc", "only word", "abc", "abc"]
    assert [len(pixels) > 0 for pixels, _ in found] == [True, False, True, False, True, True]
    assert batch["pixels"].shape == (1, 5, 12, 12, 3)


def test_no_more_pictures_in_a_row_than_there_is_room_for(folder, tmp_path):
    path = write(tmp_path / "a.jsonl", [llava(n) for n in range(8)])
    batches = read_all(opened(folder, path, max_pictures=2))
    assert all(batch["pixels"].shape[1] == 2 for batch in batches)
    assert sorted(seen_in(batches)) == sorted(expected(range(8)))


def test_without_pictures_a_model_that_sees_gets_texts_alone(folder, tmp_path):
    batch = next(opened(folder, write(tmp_path / "a.jsonl", [{"text": "no picture here, not one" * 9}])))
    assert "pixels" not in batch and "slots" not in batch


def test_it_goes_on_in_the_middle_bit_for_bit(folder, tmp_path):
    rows = [llava(n % 8, answer="ab" * (1 + n % 3) + str(n)) for n in range(60)]
    path = write(tmp_path / "a.jsonl", rows)
    whole = opened(folder, path, shuffle=True, epochs=2)
    states, batches = [], []
    while (batch := next(whole))["segment_ids"].any():
        batches.append(batch)
        states.append(whole.get_state())
    again = opened(folder, path, shuffle=True, epochs=2)
    again.set_state(json.loads(json.dumps(states[3])))
    for batch in batches[4:]:
        found = next(again)
        assert found.keys() == batch.keys() and all((found[key] == batch[key]).all() for key in batch)
    assert len(batches) > 6


def test_bad_pictures_are_left_out_and_counted(folder, tmp_path):
    shutil.copytree(folder / "shop", tmp_path / "shop")
    (tmp_path / "shop" / "5.png").write_bytes(png(5)[:90])
    rows = [llava(n % 8) for n in range(12)]
    path, notes = write(tmp_path / "a.jsonl", rows), []
    batches = read_all(
        opened(tmp_path, path, on_bad_image="skip", note=notes.append) if copy_tokenizer(folder, tmp_path) else None
    )
    assert len(seen_in(batches)) == 11
    assert len(notes) == 1 and "line 6" in notes[0] and "shop/5.png" in notes[0]
    with pytest.raises(InputError, match="damaged picture") as caught:
        read_all(opened(tmp_path, path))
    assert "a.jsonl, line 6: " in str(caught.value) and "shop/5.png" in str(caught.value)


def copy_tokenizer(folder, target) -> bool:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, target / name)
    return True


def test_more_than_a_few_bad_pictures_end_it(folder, tmp_path):
    path = write(tmp_path / "a.jsonl", [llava(n, **{"image": f"shop/{n % 9}.png"}) for n in range(60)])
    with pytest.raises(InputError, match="on_bad_image") as caught:
        read_all(opened(folder, path, on_bad_image="skip"))
    assert "that cannot be read" in str(caught.value) and "shop/8.png" in str(caught.value)


MISTAKES = {
    "there is no such file": (llava(0) | {"image": "shop/no.png"}, "no picture at"),
    "it leaves the folder": (llava(0) | {"image": "../0.png"}, "with '..'"),
    "an absolute path": (llava(0) | {"image": "/etc/hosts"}, "an absolute path"),
    "on the network": (llava(0) | {"image": "https://x.org/0.png"}, "not from elsewhere"),
    "not base64": (llava(0) | {"image": "data:image/png;base64,!"}, "not base64"),
    "a number": (llava(0) | {"image": 7}, "name of a picture"),
    "no mark": (llava(0, question="q"), "expected one for each"),
    "two marks": (llava(0, question="<image><image>q"), "expected one for each"),
    "a mark in the answer": (llava(0, question="q", answer="<image>"), "is an answer"),
    "a mark of a video": (llava(0, question="<image>\n<video>"), "'<video>'"),
    "a mark and no picture": ({"conversations": llava(0)["conversations"]}, "expected one for each"),
    "too many": (llava(0, question="<image>" * 5) | {"image": ["shop/0.png"] * 5}, "the most in a row"),
    "two keys": (llava(0) | {"images": ["shop/0.png"]}, "both 'image' and 'images'"),
    "a video": (llava(0) | {"video": "a.mp4"}, "'video' beside"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_name_line_and_file(folder, tmp_path, mistake):
    row, says = MISTAKES[mistake]
    path = write(tmp_path / "a.jsonl", [llava(1), llava(2), row, *map(llava, range(8))])
    with pytest.raises(InputError) as caught:
        read_all(opened(folder, path, max_pictures=4))
    assert says in str(caught.value) and "a.jsonl, line 3" in str(caught.value) and "\n" not in str(caught.value)


def test_a_template_that_drops_pictures(folder, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    path = write(tmp_path / "a.jsonl", [llava(n) for n in range(4)])
    with pytest.raises(InputError, match="chat template writes"):
        opened(folder, path, chat_template=str(tmp_path / "t.jinja"))


def test_a_picture_longer_than_a_row_and_a_missing_folder(folder, tmp_path):
    path = write(tmp_path / "a.jsonl", [llava(n) for n in range(8)])
    with pytest.raises(InputError, match="larger seq_len"):
        opened(folder, path, seq_len=FEATURES - 1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_all(opened(folder, path, image_folder=str(tmp_path / "nowhere")))


def test_a_model_without_an_eye_refuses(folder, tmp_path):
    blind = dense_config(vocab_size=258)
    path = write(tmp_path / "a.jsonl", [llava(n) for n in range(8)])
    with pytest.raises(InputError, match="model takes none"):
        opened(folder, path, config=blind, image_folder=None)
    with pytest.raises(InputError, match="image_folder"):
        opened(folder, write(tmp_path / "b.jsonl", [{"text": "a" * 200}]), config=blind)


def test_the_end_of_what_is_too_long_is_left_out(folder, tmp_path):
    path = write(tmp_path / "a.jsonl", [llava(0, answer="x" * 200)])
    (batch,) = read_all(opened(folder, path, batch_size=1))
    assert batch["tokens"].shape == (1, 64) and (batch["segment_ids"] == 1).all()
    assert batch["targets"][0, -1] == ord("x") and EOS not in batch["targets"]


def test_inspect_shows_pictures_with_their_sizes_and_tokens(folder, tmp_path, capsys):
    recipe = recipe_of(folder, tmp_path)
    assert cli.main(["data", "inspect", str(recipe), "--examples", "2"]) == 0
    out = capsys.readouterr().out
    assert "[shop/0.png: 20 x 15 pixels, 9 tokens]⟦a caption\n⟧" in out and "pictures" in out
    assert cli.main(["data", "inspect", str(recipe), "--json"]) == 0
    (source,) = json.loads(capsys.readouterr().out)
    assert source["pictures"] == 8 and source["shown"][1][0]["picture"] == "shop/1.png"
    assert [part["scored"] for part in source["shown"][0]] == [False, True]


def test_pictures_are_not_tokenised_in_advance(folder, tmp_path, capsys):
    assert cli.main(["data", "tokenize", str(recipe_of(folder, tmp_path)), str(tmp_path / "tokens")]) == 2
    err = capsys.readouterr().err
    assert "line 1" in err and "not tokenised in advance" in err and not (tmp_path / "tokens").exists()


def recipe_of(folder, tmp_path):
    write(tmp_path / "a.jsonl", [llava(n, answer="a caption") for n in range(8)])
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(CONFIG)))
    (tmp_path / "recipe.toml").write_text(
        f'run_dir = "run"\n[model]\nconfig = "{tmp_path}/config.json"\ninit = "random"\n[data]\nseq_len = 64\n'
        f'chat_template = "llava-plain"\ntokenizer = "{folder}/tokenizer.json"\nimage_folder = "{folder}"\n'
        f'[[data.sources]]\npath = "{tmp_path}/a.jsonl"\n'
    )
    return tmp_path / "recipe.toml"


OF_LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
IN_TURN = (
    "{% for message in messages %}<s>{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [OF_LLAVA, IN_TURN], ids=["llava", "in turn"])
def test_templates_with_parts_are_written_as_transformers_writes_them(tmp_path, template):
    byte_tokenizer(tmp_path / "tokenizer.json")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
    )
    fast.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    sides = {"height": 12, "width": 12}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size=sides)
    processor = transformers.LlavaProcessor(
        images, fast, patch_size=4, num_additional_image_tokens=1, vision_feature_select_strategy="default",
        chat_template=template,
    )  # fmt: skip
    placeholder = fast.convert_tokens_to_ids("<image>")
    config = seeing(dense_config(vocab_size=264), placeholder=placeholder)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", config)
    reader = RowReader(template=lambda: load_chat_template(tmp_path / "tokenizer.json"), sees=True)
    draw = random.Random(0)
    for number in range(20):
        said, shown = [], 0
        for _ in range(draw.randint(1, 3)):
            pictures = draw.randint(0, 2)
            parts = [{"type": "image"}] * pictures + [{"type": "text", "text": f"what {number}?\nand"}]
            said += [{"role": "user", "content": draw.sample(parts, len(parts))}]
            said += [{"role": "assistant", "content": [{"type": "text", "text": f"it is {number}"}]}]
            shown += pictures
        names = [f"{n}.png" for n in range(shown)]
        (example,) = reader({"messages": said, "images": names})
        ids = tokenizer.documents([example])[0].ids
        text = processor.apply_chat_template(said)
        pixels = [np.zeros((12, 12, 3), np.uint8)] * shown or None
        expected_ids = processor(images=pixels, text=text, add_special_tokens=False)["input_ids"]
        assert ids.tolist() == (expected_ids[0] if isinstance(expected_ids[0], list) else expected_ids)


def test_kept_pixels_are_not_made_again(folder, tmp_path, monkeypatch):
    path, kept = write(tmp_path / "a.jsonl", [llava(n) for n in range(8)]), str(tmp_path / "pixels")
    first = seen_in(read_all(opened(folder, path, pixel_cache=kept)))
    assert sorted(first) == sorted(expected(range(8)))
    monkeypatch.setattr(pixel_cache, "decode_picture", lambda *_, **__: pytest.fail("decoded twice"))
    assert seen_in(read_all(opened(folder, path, pixel_cache=kept))) == first
    with pytest.raises(InputError, match="pixel_cache"):
        opened(folder, path, pixel_cache=str(path))


def test_parts_of_text_are_lines_as_they_are_without_pictures():
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}, {"type": "image"}]
    for content, expected in ((parts, "One.\nTwo.<image>"), (parts[::-1], "<image>\nTwo.\nOne.")):
        messages = [{"role": "user", "content": content}]
        ((message,), _) = with_pictures(messages, [ANY_PICTURE], as_parts=False)
        assert message["content"] == expected
