"""Which files go wherever a model goes, and that those in a folder of templates do too."""

import pathlib

from moe_jax.files.storage_path import as_path
from moe_jax.files.tokenizer_files import (
    by_name,
    copy_tokenizer_files,
    tokenizer_files,
    tokenizer_files_in,
    with_tokenizer,
)

RAG = "additional_chat_templates/rag.jinja"


def write(folder: pathlib.Path, *names: str) -> pathlib.Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{folder.name} {name}")
    return folder


def test_templates_in_their_folder_keep_their_names_wherever_they_are_copied(tmp_path: pathlib.Path):
    names = {"chat_template.jinja", "tokenizer.json", "tekken.json", "generation_config.json", RAG}
    others = (
        "weights.bin",
        "notes/rag.jinja",
        "additional_chat_templates/rag.txt",
        "additional_chat_templates/a/b.jinja",
    )
    source, target = write(tmp_path / "model", *names, *others), as_path(tmp_path / "copy")
    files = by_name(tokenizer_files_in(source))
    assert files.keys() == names
    target.mkdir()
    copy_tokenizer_files(files, target)
    assert set(target.files_below()) == names
    assert (target / RAG).read_text() == f"model {RAG}"


def test_another_tokenizer_comes_with_its_own_templates(tmp_path: pathlib.Path):
    model = write(tmp_path / "model", "generation_config.json", "tokenizer.json", RAG)
    other = write(tmp_path / "other", "tokens.json", RAG, "tekken.json")
    files = with_tokenizer(tokenizer_files_in(model), other / "tokens.json")
    assert files == tokenizer_files(other / "tokens.json") | {
        "generation_config.json": model / "generation_config.json"
    }
    assert files[RAG].read_text() == f"other {RAG}" and files["tokenizer.json"] == other / "tokens.json"
    plain = write(tmp_path / "plain", "tokenizer.json")
    assert RAG not in with_tokenizer(tokenizer_files_in(model), plain / "tokenizer.json")
