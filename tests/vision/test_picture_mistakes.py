"""Mistakes in data with pictures: each is one line that says where it is, found before memory is taken for it."""

import json
import shutil

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data import sources
from moe_jax.data.file_records import JsonLines
from moe_jax.data.packing import check_room
from moe_jax.data.pictures.picture_loading import PictureLoader
from moe_jax.data.pictures.picture_sources import MOST_OF_ROW, PictureFiles, PictureSource, pictures_of_row
from moe_jax.data.rows import RowReader
from moe_jax.data.sections import DataSection, FieldsSection
from moe_jax.data.sources import check_beginning, template_loader
from moe_jax.data.tokenizer import Document
from moe_jax.demo import small_world
from moe_jax.distributed.sharding import make_mesh
from moe_jax.images.picture_files import PictureFolder
from moe_jax.training.batches import Batches
from moe_jax.training.program import abstract_batch
from moe_jax.training.recipe import load_recipe
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.drawn_pictures import picture_shop
from tests.support.seeing_models import FEATURES
from tests.support.tiers import long
from tests.vision.test_picture_data import CONFIG, llava, opened, png, read_all, recipe_of, seen_in, write
from tests.vision.test_picture_training import RECIPE
from tests.vision.test_picture_training import folder as folder_with_model  # noqa: F401


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with eight pictures, and a tokenizer that names its EOS."""
    return picture_shop(tmp_path_factory.mktemp("mistakes"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shop/\ud800.png", "'shop/\\ud800.png' is no name of a picture"),
        ("shop/\x1b[31m\n.png", "no picture at FOLDER/'shop/\\x1b[31m\\n.png'"),
        (f"shop/{'x' * 3000}.png", "cannot be read: File name too long"),
    ],
)
def test_names_of_pictures_are_said_on_one_short_line(shop, name, said):
    with pytest.raises((InputError, FileNotFoundError)) as caught:
        PictureFolder(shop).read(name)
    message = str(caught.value).replace(str(shop), "FOLDER")
    assert said in message and message.isprintable() and len(message) < 200


def test_a_picture_is_missed_without_reading_it(shop):
    folder = PictureFolder(shop)
    folder.check("shop/1.png")
    for name, error in (("shop/none.png", FileNotFoundError), ("shop", FileNotFoundError), ("../x.png", InputError)):
        with pytest.raises(error):
            folder.check(name)


def test_a_long_name_that_is_a_name_is_said_as_a_whole(shop):
    with pytest.raises(FileNotFoundError, match="no picture at .*/shop/x{200}.png$"):
        PictureFolder(shop).read(f"shop/{'x' * 200}.png")


def test_a_row_has_so_many_pictures_at_most():
    assert len(pictures_of_row({"image": ["a.png"] * MOST_OF_ROW})) == MOST_OF_ROW
    with pytest.raises(InputError, match="'image' holds 4,097 pictures; at most 4,096"):
        pictures_of_row({"image": ["a.png"] * (MOST_OF_ROW + 1)})


@pytest.mark.parametrize("null", [None, "", [], {}, {"bytes": None, "path": None}])
def test_rows_without_a_picture(null):
    assert pictures_of_row({"image": null}) == []
    with pytest.raises(InputError, match="a picture"):
        pictures_of_row({"image": [None]})


def test_no_more_room_for_pictures_than_a_row_has(shop, tmp_path):
    path = write(tmp_path / "a.jsonl", [llava(n) for n in range(8)])
    check_room(64 // FEATURES, FEATURES, 64)
    for count in (64 // FEATURES + 1, 10**9):
        with pytest.raises(InputError, match="7 go into data.seq_len = 64"):
            opened(shop, path, max_pictures=count)
    recipe = load_recipe(recipe_of(shop, tmp_path), ["data.seq_len=32"])
    mesh = make_mesh({}, jax.devices()[:1])
    with pytest.raises(InputError, match="3 go into data.seq_len = 32"):
        abstract_batch(recipe, CONFIG, mesh, pictures=10**9)


@pytest.mark.parametrize("setting", ['image_folder=""', 'feature_cache=""', "cache_gib=1e300"])
def test_settings_that_are_none(shop, tmp_path, capsys, setting):
    assert cli.main(["data", "inspect", str(recipe_of(shop, tmp_path)), "--set", f"data.{setting}"]) == 2
    err = capsys.readouterr().err
    assert setting.split("=")[0] in err and err.count("\n") == 1


@pytest.mark.parametrize("place", ["a file", "a bucket"])
def test_features_are_kept_in_a_folder(folder_with_model, tmp_path, capsys, monkeypatch, place):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    cache = "gs://bucket/features" if place == "a bucket" else "file"
    assert cli.main(["train", str(recipe_in(folder_with_model, tmp_path)), "--set", f"data.feature_cache={cache}"]) == 2
    assert "expected a folder on a disk" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml", "file"]


def test_features_are_kept_only_where_there_is_room_for_one(folder_with_model, tmp_path, capsys):  # noqa: F811
    settings = [f"data.feature_cache={tmp_path / 'kept'}", "data.cache_gib=1e-7"]
    given = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["train", str(recipe_in(folder_with_model, tmp_path)), *given]) == 2
    assert "cache_gib = 1e-07" in capsys.readouterr().err and not (tmp_path / "kept").exists()


def recipe_in(folder, tmp_path):
    text = RECIPE.replace("RUN", str(tmp_path / "run")).replace("MODEL", f"{folder}/model")
    text = text.replace("FOLDER", str(folder)).replace("llava-v1", f"{folder}/template.jinja")
    (tmp_path / "a.toml").write_text(text)
    return tmp_path / "a.toml"


@long
def test_pictures_that_are_left_out_are_said_while_training(folder_with_model, tmp_path, capsys):  # noqa: F811
    rows = [llava(n, answer=str(n)) for n in range(20)] + [llava(0) | {"image": "shop/none.png"}]
    path = write(tmp_path / "b.jsonl", rows)
    recipe = recipe_in(folder_with_model, tmp_path)
    recipe.write_text(recipe.read_text().replace(f"{folder_with_model}/a.jsonl", str(path)))
    settings = ["data.on_bad_image=skip", f"data.image_folder={folder_with_model}", "train.steps=2", "data.epochs=2"]
    given = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["train", str(recipe), *given]) == 0
    out = capsys.readouterr().out
    assert out.count("note: left out") == 1 and "line 21: no picture at" in out


def test_an_error_in_the_background_has_no_note_of_others(shop, tmp_path):
    path = write(tmp_path / "a.jsonl", [llava(0) | {"image": "shop/none.png"}] * 8)
    data = opened(shop, path, prefetch=2)
    batches = Batches(data, make_mesh({}, jax.devices()[:1]), 2, ends=True)
    with pytest.raises(InputError, match="line 1: no picture at") as caught:
        next(batches)
    batches.close()
    assert getattr(caught.value, "__notes__", []) == []


class Known:
    shape, dtype = (1, 1), np.dtype(np.float32)

    def find(self, digest):
        return np.zeros((1, 1), np.float32)


def test_every_tenfold_of_bad_pictures_is_said(shop):
    """Of 2000 pictures 16 are bad, which is below 1 %, although 4 of the first 360 are more."""
    assert CONFIG.vision is not None
    notes, documents = [], []
    load = PictureLoader(PictureFiles(shop), CONFIG.vision.processing, on_bad="skip", known=Known(), note=notes.append)
    for number in range(2000):
        name = "none" if number < 360 and number % 90 == 0 or number % 150 == 0 else str(number % 8)
        picture = PictureSource(f"shop/{name}.png", None, f"line {number}")
        documents.append(Document(np.zeros(2, np.int32), np.zeros(2, np.float32), pictures=(picture,)))
    kept, pictures = load(documents)
    assert len(kept) == len(pictures) == 2000 - load.bad and load.seen == 2000
    assert len(notes) == 2 and "line 0: " in notes[0] and "(10 of " in notes[1]
    with pytest.raises(InputError, match="number 4 of 4"):
        PictureLoader(PictureFiles(shop), CONFIG.vision.processing, on_bad="skip")([documents[0]] * 9)


TEXT = [{"type": "text", "text": "q"}]


def test_texts_in_parts_are_written_by_templates_of_texts(shop, tmp_path):
    """Rows with and without pictures are of one form, as tables have them."""
    pictures = [{"bytes": png(1), "path": None}]
    rows = [
        {
            "images": pictures if number % 2 else [],
            "messages": [
                {"role": "user", "content": [{"type": "image", "text": None}] * (number % 2) + TEXT},
                {"role": "assistant", "content": [{"type": "text", "text": "abc"}]},
            ],
        }
        for number in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = seen_in(read_all(opened(shop, tmp_path / "a.parquet")))
    assert len(found) == 40 and sum(len(pixels) > 0 for pixels, _ in found) == 20
    assert {text for _, text in found} == {"abc"}
    rows = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a <image>"}]}, rows[0]["messages"][1]]}
    ]
    with pytest.raises(InputError, match="as a part"):
        opened(shop, write(tmp_path / "b.jsonl", rows))


@pytest.mark.parametrize("row", [{"prompt": "<image>", "response": "abc"}, llava(0)], ids=["pair", "chat"])
def test_marks_whose_picture_no_field_names(shop, tmp_path, row):
    keys = {"prompt": "prompt", "response": "response"}
    if "prompt" not in row:
        keys = {"messages": "conversations", "role": "from", "content": "value"}
    path = write(tmp_path / "a.jsonl", [row] * 8)
    with pytest.raises(InputError, match="line 1: .*: 0, and places .*: 1; .*fields.image names the key"):
        opened(shop, path, fields=FieldsSection(**keys))
    with pytest.raises(InputError, match=": 0, and places .*: 1; expected one for each$"):
        opened(shop, write(tmp_path / "a.jsonl", [row | {"image": None}] * 8))


def test_answers_end_with_a_token(shop, tmp_path):
    section = DataSection(chat_template="llava-v1")
    assert "eos_token" in template_loader(section, shop / "tokenizer.json")().special_tokens
    byte_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match="names no EOS token"):
        template_loader(section, tmp_path / "tokenizer.json")()
    template_loader(DataSection(chat_template="llava-plain"), tmp_path / "tokenizer.json")()
    with pytest.raises(FileNotFoundError, match="'llava-v1'.* llava-plain or"):
        template_loader(DataSection(chat_template="llava-v2"), tmp_path / "tokenizer.json")()


def test_what_training_refuses_is_refused_by_inspect(shop, tmp_path, capsys):
    recipe = recipe_of(shop, tmp_path)
    assert cli.main(["data", "inspect", str(recipe), "--set", "data.seq_len=4"]) == 2
    assert "larger seq_len" in capsys.readouterr().err
    write(tmp_path / "a.jsonl", [llava(1), llava(0, "<image>" * 9, image=["shop/0.png"] * 9)])
    assert cli.main(["data", "inspect", str(recipe)]) == 2
    assert "line 2: 9 pictures, data.max_pictures = 5" in capsys.readouterr().err
    write(tmp_path / "a.jsonl", [llava(1, image="data:image/png;base64,aaaa")])
    assert cli.main(["data", "inspect", str(recipe)]) == 2
    assert "line 1: a picture in the row is not a picture" in capsys.readouterr().err
    assert cli.main(["data", "inspect", str(recipe), "--set", "data.on_bad_image=skip"]) == 0
    assert "[a picture in the row: cannot be read, and the document is left out, 9 tokens]" in capsys.readouterr().out


def test_no_more_than_a_part_of_pictures_in_rows_is_read_before_training(shop, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHECKED_BYTES", 10_000)
    read = []

    class Rows(JsonLines):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    section = DataSection(chat_template="llava-plain")
    reader = RowReader(template=template_loader(section, shop / "tokenizer.json"), sees=True)
    check_beginning([Rows(write(tmp_path / "a.jsonl", [llava(n % 8) for n in range(40)]), reader)])
    assert len(read) == 10  # short conversations count as of 1 KiB
    read.clear()
    monkeypatch.setattr(sources, "CHECKED_BYTES", 4000)
    texts = [{"text": "<image>", "image": f"data:image/png;base64,{'aaaa' * 500}"}] * 40
    check_beginning([Rows(write(tmp_path / "b.jsonl", texts), reader)])
    assert len(read) == 3


def test_a_world_with_too_long_a_name(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        small_world.main([str(tmp_path / ("x" * 300)), "--train", "1", "--test", "1"])
    assert "too long" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_rows_whose_pictures_cannot_be_read_are_passed_over_by_eval(folder_with_model, tmp_path, capsys):  # noqa: F811
    shutil.copytree(folder_with_model / "model", tmp_path / "model")
    shutil.copy(folder_with_model / "template.jinja", tmp_path / "model" / "chat_template.jinja")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "0.png").write_bytes(png(0))
    (tmp_path / "shop" / "1.png").write_bytes(png(1)[:90])
    rows = [llava(0), llava(1), llava(0, image="shop/none.png"), llava(0, image=7), llava(0, answer="abcd")]
    command = ["eval", str(tmp_path / "model"), "--text", str(write(tmp_path / "a.jsonl", rows)), "--json"]
    write(tmp_path / "a.jsonl", rows[:3])
    assert cli.main(command) == 2
    err = capsys.readouterr().err  # of the one that is not there: before any is decoded
    assert "line 3: no picture at" in err and err.count("a.jsonl") == 1
    write(tmp_path / "a.jsonl", rows)
    assert cli.main([*command, "--bad-documents", "skip"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["windows"], found["skipped"]) == (2, 3)
    for number, problem in zip((2, 3, 4), found["problems"], strict=True):
        assert problem.count(f"line {number}: ") == 1
