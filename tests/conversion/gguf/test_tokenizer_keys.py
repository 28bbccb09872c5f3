"""Tokenizers in exported GGUF files: the same ids when they are read again, and notes where llama.cpp differs."""

import gc
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

import moe_jax
from moe_jax.conversion import GGUFModel
from moe_jax.conversion.gguf.gguf_cuts import PIECES, cutter
from moe_jax.conversion.gguf.gguf_header import read_gguf_header
from moe_jax.conversion.gguf.gguf_vocabulary import tokenizer_of
from moe_jax.conversion.gguf.tokenizer_keys import tokenizer_keys
from moe_jax.conversion.hf_config import read_hf_config
from moe_jax.core.errors import InputError
from tests.conversion.gguf.test_gguf_vocabulary import PUBLISHED, TEXTS, WORDS, published
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint

AWKWARD = (
    *TEXTS,
    *WORDS,
    "\u2581 a\u2581b",
    "<|sep|><|begin|>",
    "\x00\x01",
    "<0x41>",
    "a  \u3000b",
    "\U0001f9d1\u200d\U0001f680",
)


def config_of(size, **changes):
    return read_hf_config({**CONFIGS["llama"], "vocab_size": size, **changes})


def out_and_in(made, folder, size, *, ends=(), settings=None):
    """The tokenizer after it was written and read, what else was read, and the notes."""
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    found, notes = tokenizer_keys(tuple(folder.iterdir()), config_of(size, bos_token_id=None), ends)
    # As a file holds them.
    found["tokenizer.ggml.token_type"] = np.array(found["tokenizer.ggml.token_type"], np.int32)
    if "tokenizer.ggml.scores" in found:
        found["tokenizer.ggml.scores"] = np.array(found["tokenizer.ggml.scores"], np.float32)
    text, said = tokenizer_of(found)
    return tokenizers.Tokenizer.from_str(text), said, found, notes


def assert_same_ids(theirs, ours):
    for text in AWKWARD:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special).ids == ids, text
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize("pre", PUBLISHED)
def test_bytes(tmp_path, pre):
    theirs = published(pre)
    settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}"}
    size = theirs.get_vocab_size()
    ours, said, found, notes = out_and_in(theirs, tmp_path, size + 5, ends=(1, 2), settings=settings)
    assert_same_ids(theirs, ours)
    assert notes == [] and PIECES[found["tokenizer.ggml.pre"]] == PIECES[pre]
    assert (said["bos_token"], said["eos_token"], said["chat_template"]) == ("<|begin|>", "<|end|>", "{{ messages }}")
    assert not said["add_bos_token"] and found["tokenizer.ggml.eot_token_id"] == 2
    special = {token.content: token.special for token in ours.get_added_tokens_decoder().values()}
    assert special == {"<|begin|>": True, "<|end|>": True, "<|sep|>": False}
    assert ours.get_vocab_size() == size


def test_every_name_of_cuts_is_recognised():
    for pre, pieces in PIECES.items():
        made = tokenizers.Tokenizer(models.BPE(ignore_merges=pieces.ignore_merges))
        made.pre_tokenizer = cutter(pieces)
        if pieces.normalizer is not None:
            made.normalizer = pieces.normalizer
        from moe_jax.conversion.gguf.tokenizer_keys import _of_bytes

        found, notes = _of_bytes(json.loads(made.to_str()), b"")
        assert PIECES[found["tokenizer.ggml.pre"]] == pieces and notes == [], pre


@pytest.mark.parametrize(("single", "begins", "ends"), [("<|begin|> $A", True, False), ("$A <|end|>", False, True)])
def test_bos_and_eos_are_added_as_before(tmp_path, single, begins, ends):
    theirs = published("gpt-2")
    special = [("<|begin|>", 0), ("<|end|>", 1)]
    theirs.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    ours, said, *_ = out_and_in(theirs, tmp_path, 500, ends=(1,), settings=settings)
    assert_same_ids(theirs, ours)
    assert (said["add_bos_token"], said["add_eos_token"]) == (begins, ends)


def test_cuts_without_a_name_come_whole(tmp_path):
    """llama.cpp cuts them as it likes; here they are read as they were."""
    theirs = tokenizers.Tokenizer.from_file(str(byte_tokenizer(tmp_path / "tokenizer.json", adds_bos=True)))
    ours, _, found, notes = out_and_in(theirs, tmp_path, 260)
    assert found["tokenizer.ggml.pre"] == "default" and "has no name" in notes[0]
    assert_same_ids(theirs, ours)
    found["tokenizer.huggingface.json"] = "{}"
    with pytest.raises(InputError, match="tokenizer.huggingface.json is not"):
        tokenizer_of(found)
    del found["tokenizer.huggingface.json"]
    with pytest.raises(InputError, match="tokenizer.ggml.pre is 'default'"):
        tokenizer_of(found)


def test_texts_that_are_changed_before_they_are_cut(tmp_path):
    theirs = published("gpt-2")
    theirs.normalizer = normalizers.Lowercase()
    *_, found, notes = out_and_in(theirs, tmp_path, 500)
    assert found["tokenizer.ggml.pre"] == "gpt-2" and "changes texts" in notes[0]


def characters(*, prefix=True, metaspace=False):
    """A small tokenizer of characters and bytes, whose merges are all pairs in the order of the tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["th", "\u2581th", "he", "\u2581the", "in", "ing", "\u2581t", "a\u2581b", "\u2581\u2581"]
    letters = sorted({letter for word in words for letter in word} | set("abcdefghijklmnopqrstuvwxyz"))
    vocab = {token: number for number, token in enumerate([*tokens, *words, *letters])}
    merges = [(word[:cut], word[cut:]) for word in words for cut in sorted(
        range(1, len(word)), key=lambda cut: (vocab.get(word[:cut], 0), vocab.get(word[cut:], 0))
    ) if word[:cut] in vocab and word[cut:] in vocab]  # fmt: skip
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        scheme = "first" if prefix else "never"
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    else:
        spaces = [normalizers.Replace(" ", "\u2581")]
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *spaces] if prefix else spaces)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    made.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.mark.parametrize("prefix", [True, False])
def test_characters(tmp_path, prefix):
    theirs = characters(prefix=prefix)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    ours, said, found, notes = out_and_in(theirs, tmp_path, theirs.get_vocab_size(), ends=(2,), settings=settings)
    assert_same_ids(theirs, ours)
    assert notes == [] and found["tokenizer.ggml.add_space_prefix"] is prefix and said["unk_token"] == "<unk>"
    assert found["tokenizer.ggml.model"] == "llama" and said["add_bos_token"]
    kinds = found["tokenizer.ggml.token_type"].tolist()
    assert kinds[:4] == [2, 3, 3, 6] and kinds[259] == 1
    assert ours.decode(ours.encode("the \u4f60 thing").ids) == "the \u4f60 thing"


def test_spaces_of_newer_tokenizers(tmp_path):
    theirs = characters(metaspace=True)
    ours, _, found, notes = out_and_in(theirs, tmp_path, theirs.get_vocab_size(), settings={"bos_token": "<s>"})
    assert "begin with one" in notes[0] and found["tokenizer.ggml.add_space_prefix"]
    for text in ("the thing", "x  the"):
        assert ours.encode(text).ids == theirs.encode(text).ids


def test_the_tokenizer_of_stories(tmp_path, data_dir):
    file = data_dir / "weights" / "stories260K" / "hf" / "tokenizer.json"
    theirs = tokenizers.Tokenizer.from_file(str(file))
    ours, _, _, notes = out_and_in(theirs, tmp_path, theirs.get_vocab_size(), settings={"bos_token": "<s>"})
    assert notes == []
    assert_same_ids(theirs, ours)


def test_merges_that_no_scores_make_are_noted(tmp_path):
    data = json.loads(characters().to_str())
    data["model"]["merges"].reverse()
    made = tokenizers.Tokenizer.from_str(json.dumps(data))
    *_, notes = out_and_in(made, tmp_path, made.get_vocab_size())
    assert "merges are not those" in notes[0]


def test_more_steps_and_tokens_that_take_spaces_are_noted(tmp_path):
    made = characters()
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), made.normalizer])
    made.add_tokens([AddedToken("<image>", lstrip=True)])
    *_, notes = out_and_in(made, tmp_path, made.get_vocab_size(), ends=(1, 2, 3, 4))
    assert [" ".join(note.split()[1:4]) for note in notes] == [
        "the tokenizer does", "some added tokens", "4 tokens end"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "size", "message"),
    [
        (tokenizers.Tokenizer(models.Unigram([("a", 0.0)])), 10, "'Unigram'"),
        (tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a")), 10, "'WordPiece'"),
        (published("gpt-2"), 300, "300"),
    ],
)
def test_tokenizers_that_cannot_be_written(tmp_path, made, size, message):
    with pytest.raises(InputError, match=message) as caught:
        out_and_in(made, tmp_path, size)
    assert len(str(caught.value).splitlines()) == 1 and "without its tokenizer files" in str(caught.value)


def test_a_model_with_its_tokenizer(tmp_path):
    """Whole: the numbers of special tokens, and the file of a model that has none."""
    theirs = published("qwen2")
    config = {**CONFIGS["llama"], "vocab_size": theirs.get_vocab_size() + 3, "bos_token_id": 0, "eos_token_id": [1, 2]}
    folder = write_checkpoint(tmp_path / "hf", config, random_tensors(config))
    theirs.save(str(folder / "tokenizer.json"))
    path = moe_jax.export(folder, tmp_path / "m.gguf", format="gguf")
    model = GGUFModel(path)
    assert (model.config.bos_id, model.config.eos_ids) == (0, (1, 2))
    ours = tokenizers.Tokenizer.from_file(str(model.tokenizer_files[0]))
    assert_same_ids(theirs, ours)
    assert read_gguf_header(path).metadata["tokenizer.ggml.pre"] == "qwen2"
    loaded = moe_jax.load(path)  # its files were made for a source that is gone
    gc.collect()
    assert list(loaded.tokenizer.encode("some words")) == theirs.encode("some words", add_special_tokens=False).ids
    (folder / "tokenizer.json").unlink()
    bare = GGUFModel(moe_jax.export(folder, tmp_path / "bare.gguf", format="gguf"))
    assert bare.tokenizer_files == ()
