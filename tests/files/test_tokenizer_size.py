"""A tokenizer.json is measured before its library reads it: what takes far more memory than a vocabulary is refused."""

import json

import pytest

from moe_jax.core.errors import InputError
from moe_jax.files import tokenizer_size
from moe_jax.files.tokenizer_size import MOST_CHARSMAP, MOST_LONG, MOST_PARTS, MOST_TOKEN, check_size

PIECE = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
MODEL = {"type": "BPE", "unk_token": None, "vocab": {"<s>": 0, 'a"[{\\': 1}, "merges": [["a", "b"], "a b"]}
WHOLE = {
    "version": "1.0",
    "added_tokens": [{"id": 0, "content": "<s>", **SPECIAL}],
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "A" * (MOST_PARTS + 4)},
    "post_processor": {"type": "Sequence", "processors": [{"type": "TemplateProcessing", "single": [PIECE]}]},
    "model": MODEL,
}


def unigram(*tokens):
    return {"model": {"type": "Unigram", "vocab": [[token, -1.5] for token in tokens]}}


def with_model(**settings):
    return {"model": MODEL | settings}


@pytest.mark.parametrize(
    "change", [{}, unigram("a", "b"), unigram(*(str(i) * 200 for i in range(300))), {"added_tokens": []}, {"model": {}}]
)
@pytest.mark.parametrize("indent", [None, 2])
def test_what_is_in_use_is_read(change, indent):
    check_size(json.dumps(WHOLE | change, indent=indent).encode())


TOO_MUCH = {
    "template": ({"post_processor": {"single": [PIECE] * 3000}}, "'post_processor'"),
    "key": ({"a" * MOST_PARTS: 0}, "besides the vocabulary"),
    "map": ({"normalizer": {"precompiled_charsmap": "a" * (MOST_CHARSMAP + 1)}}, "map of characters"),
    "trie": ({"normalizer": {"precompiled_charsmap": "/////wAAAAA="}}, "for its trie"),
    "expressions": ({"pre_tokenizer": {"pattern": {"Regex": "[a]" * MOST_PARTS}}}, "'pre_tokenizer'"),
    "no object": ({"model": [0] * MOST_PARTS}, "'model'"),
    "settings": (with_model(nothing=[{}] * 1000), "besides its vocabulary"),
    "prefix": (with_model(continuing_subword_prefix="a" * 2000), "besides its vocabulary"),
    "vocabulary in objects": (with_model(vocab=[{}] * 300_000), "objects among the tokens"),
    "added objects": ({"added_tokens": [{}] * 300_000}, "objects among the tokens"),
    "token": (with_model(vocab={"a" * MOST_TOKEN: 0}), "in one token"),
    "piece": (unigram("\\" * MOST_TOKEN), "in one token"),
    "piece of quotes": (unigram(("a" * 100 + '"') * 1000), "in one token"),
    "chain": (unigram(*("a" * length for length in range(300))), "begin with each"),
    "added": ({"added_tokens": [{"id": 1, "content": "é" * MOST_TOKEN}]}, "in one token"),
    "long tokens": (unigram(*(str(i) + "a" * 2000 for i in range(MOST_LONG // 2000))), "in long tokens"),
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_what_is_too_much_is_refused_by_name(kind):
    change, named = TOO_MUCH[kind]
    with pytest.raises(InputError, match=named):
        check_size(json.dumps(WHOLE | change).encode())


@pytest.mark.parametrize(
    ("limit", "change", "named"),
    [
        ("MOST_VALUES", with_model(merges=[["a", "b"]] * 20), "values in the vocabulary"),
        ("MOST_ADDED", {"added_tokens": [{"id": 1, "content": "a" * 60}]}, "in the added tokens"),
        ("MOST_PIECES", unigram(*"abcdefghijklmnopqrstuvwxyz"), "tokens of the vocabulary"),
    ],
)
def test_the_largest_are_refused(monkeypatch, limit, change, named):
    monkeypatch.setattr(tokenizer_size, limit, 50)
    check_size(json.dumps({"model": MODEL}).encode())
    with pytest.raises(InputError, match=named):
        check_size(json.dumps({"model": MODEL} | change).encode())


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "column 1"),
        (b"[]", "no object"),
        (b'{"model": {"vocab": {"a": 0}', "valid JSON"),
        (b'{"a": ' + b"[" * 13 + b"]" * 13 + b"}", "12 levels"),
        (b"[" * 2_000_000, "values"),
        (b"{" + b",".join(b'"%d":0' % i for i in range(65)) + b"}", "64 parts"),
    ],
)
def test_what_is_no_object_is_refused(content, named):
    with pytest.raises(InputError, match=named):
        check_size(content)


@pytest.mark.parametrize(("plain", "written"), [("charsmap", r"charsm\u0061p"), ("/", r"\/")])
def test_a_map_of_characters_is_found_however_it_is_written(plain, written):
    content = json.dumps({"normalizer": [{"precompiled_charsmap": "/////wAAAAA="}]})
    with pytest.raises(InputError, match="for its trie"):
        check_size(content.replace(plain, written).encode())
