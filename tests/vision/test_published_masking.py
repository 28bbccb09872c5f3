"""Conversations about pictures become the ids, slots and scored tokens of MoE-LLaVA's published code."""

import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, models, pre_tokenizers, trainers

from moe_jax.data.chat_template import read_chat_template, template_file
from moe_jax.data.rows import RowReader
from moe_jax.data.tokenizer import Tokenizer
from tests.support.dense_models import dense_config
from tests.support.seeing_models import FEATURES, seeing
from tests.support.tiers import one_in

END, PICTURE, IGNORED = "<|endoftext|>", -200, -100
CHAT = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
WORDS = (
    "What is this? The cat sits; two red cars, 1999 of them! don't (yes) a-b café 字 it's\nThere are 3 \n\nlines USER "
    "assistant: <b> A. B. no No 12345 naïve …"
).split(" ")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS = {
    "phi": pre_tokenizers.ByteLevel(add_prefix_space=False),
    **{
        name: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERN.replace("NUMBER", number)), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for name, number in (("stablelm", r"\p{N}{1,3}"), ("qwen", r"\p{N}"))
    },
}


@pytest.fixture(scope="module", params=SPLITTERS)
def tokenizer_file(request, tmp_path_factory):
    """A tokenizer that splits as the backbone's does, with few merges."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = SPLITTERS[request.param]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
    made.train_from_iterator([" ".join(WORDS), CHAT] * 3, trainer)
    folder = tmp_path_factory.mktemp(request.param)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "bos_token": END}))
    return folder / "tokenizer.json"


def conversation(draw: random.Random, turns: int, pictures: int) -> list[dict[str, str]]:
    said = []
    for turn in range(turns):
        question = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        if turn == 0 and pictures:
            question = draw.choice([f"{'<image>' * pictures}\n{question}", f"{question}\n{'<image>' * pictures}"])
        said.append({"from": "human", "value": question})
        said.append({"from": "gpt", "value": " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))})
    return said


def published(encode, said: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """The ids, with -200 for a picture, and labels, -100 where none is scored, as the published code makes them."""

    def apart(text: str) -> list[int]:
        first, *others = (encode(piece) for piece in text.split("<image>"))
        return first + [one for piece in others for one in (PICTURE, *piece)]

    prompt = CHAT + " "
    for index, turn in enumerate(said):
        role, end = (("USER", " "), ("ASSISTANT", END))[index % 2]
        prompt += f"{role}: {turn['value']}{end}"
    ids = apart(prompt)
    labels, at = list(ids), 0
    for one_round in prompt.split(END):
        if not one_round:
            break
        parts = one_round.split(" ASSISTANT: ")
        if len(parts) != 2:
            break
        asked = len(apart(parts[0] + " ASSISTANT: ")) - 1  # the space behind the colon is a part of the answer
        labels[at : at + asked] = [IGNORED] * asked
        at += len(apart(one_round)) + 1
    labels[at:] = [IGNORED] * (len(labels) - at)
    assert at == len(ids), "the published code would leave this conversation out"
    return ids, labels


def spread(ids, labels):
    """Pictures as their features: ids, labels and slots."""
    wide_ids, wide_labels, slots = [], [], []
    for one, label in zip(ids, labels, strict=True):
        times = FEATURES if one == PICTURE else 1
        wide_ids += [one] * times
        wide_labels += [IGNORED if one == PICTURE else label] * times
        slots += [1 + sum(s > 0 for s in slots) + i if one == PICTURE else 0 for i in range(times)]
    return wide_ids, wide_labels, slots


def reader(file, name):
    template = read_chat_template(template_file(name), file)
    return RowReader(template=lambda: template, sees=True)


def row(said, pictures):
    names = [f"{number}.png" for number in range(pictures)]
    return {"id": "1", **({"image": names[0] if pictures == 1 else names} if pictures else {}), "conversations": said}


@one_in(3)
def test_conversations(tokenizer_file):
    config = seeing(dense_config(vocab_size=512))
    tokenizer, read = Tokenizer(tokenizer_file, config), reader(tokenizer_file, "llava-v1")
    draw = random.Random(0)
    for number in range(500 // 3 + 1):
        pictures = draw.choice([0, 1, 1, 1, 2, 3])
        said = conversation(draw, draw.randint(1, 4), pictures)
        ids, labels, slots = spread(*published(lambda text: tokenizer.encode(text).tolist(), said))
        (document,) = tokenizer.documents(read(row(said, pictures)))
        stand = np.array(slots) > 0
        np.testing.assert_array_equal(document.ids[~stand], np.array(ids)[~stand], err_msg=str(number))
        np.testing.assert_array_equal(document.scored, np.array(labels) != IGNORED, err_msg=str(number))
        np.testing.assert_array_equal(np.zeros(len(ids)) if document.slots is None else document.slots, slots)
        assert [picture.name for picture in document.pictures] == [f"{n}.png" for n in range(pictures)]


def test_captions(tokenizer_file):
    config = seeing(dense_config(vocab_size=512))
    tokenizer, read = Tokenizer(tokenizer_file, config), reader(tokenizer_file, "llava-plain")
    draw = random.Random(1)
    for _ in range(50):
        said = conversation(draw, 1, 1)
        caption = tokenizer.encode(said[1]["value"] + "\n").tolist()
        (document,) = tokenizer.documents(read(row(said, 1)))
        assert document.ids[FEATURES:].tolist() == caption
        assert document.scored.tolist() == [0] * FEATURES + [1] * len(caption)
