"""`moe-jax generate`, as a user runs it."""

import dataclasses
import io
import itertools
import json
import re

import pytest

import moe_jax
from moe_jax.api.generate import FIRST_BLOCK, _speed
from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.commands.generate import _prompts_of, _show_speed
from moe_jax.model_io import loading
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves, write_model


def run(capsys, *arguments) -> str:
    assert cli.main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def describe(capsys, *arguments) -> list[dict]:
    return json.loads(run(capsys, *arguments, "--json"))


@pytest.fixture(scope="module")
def config():
    return dataclasses.replace(dense_config(num_layers=2, vocab_size=258, bos_id=BOS, eos_ids=(EOS,)), max_positions=64)


@pytest.fixture(scope="module")
def model(config, tmp_path_factory):
    """A random model over bytes; its tokenizer puts BOS before a text."""
    folder = tmp_path_factory.mktemp("generate")
    tokenizer = byte_tokenizer(folder / "tokenizer.json", adds_bos=True)
    return write_model(folder / "model", config, random_leaves(config), (tokenizer,))


@pytest.fixture(scope="module")
def bare_model(config, tmp_path_factory):
    """The same without tokenizer."""
    return write_model(tmp_path_factory.mktemp("generate") / "bare", config, random_leaves(config))


def test_stories260k_tells_its_story(data_dir, capsys):
    folder = data_dir / "weights" / "stories260K"
    reference = (folder / "greedy_reference_from_upstream_doc.txt").read_text()
    out = run(capsys, folder / "hf", "--prompt", "", "--max-new-tokens", 256, "--stop-ids", 1)
    assert out.strip() == reference.strip()
    prompt = "Once upon a time, there was a little girl named Lily."
    (entry,) = describe(capsys, folder / "hf", "--prompt", prompt, "--max-new-tokens", 40)
    assert entry["prompt"] == prompt and entry["prompt_ids"][0] == 1
    assert len(entry["ids"]) == 40 and not entry["stopped"]
    assert reference.startswith(prompt + entry["text"]) and entry["text"].startswith(" She")


def test_bos_is_put_before_texts_and_not_before_ids(model, capsys):
    texts = describe(capsys, model, "--prompt", "ab", "--prompt", "c", "--max-new-tokens", 4)
    assert [entry["prompt_ids"] for entry in texts] == [[BOS, 97, 98], [BOS, 99]]
    assert [entry["prompt"] for entry in texts] == ["ab", "c"]
    (ids,) = describe(capsys, model, "--ids", f"{BOS},97,98", "--max-new-tokens", 4)
    assert ids == texts[0]


def test_bos_that_only_tokenizer_config_names(config, tmp_path, capsys):
    files = (byte_tokenizer(tmp_path / "tokenizer.json"), tmp_path / "tokenizer_config.json")
    for setting, ids in ((True, [BOS, 97]), (False, [97])):
        files[1].write_text(json.dumps({"add_bos_token": setting}))
        path = write_model(tmp_path / str(setting), config, random_leaves(config), files)
        assert describe(capsys, path, "--prompt", "a", "--max-new-tokens", 1)[0]["prompt_ids"] == ids


def test_a_model_without_tokenizer_continues_ids(bare_model, capsys):
    out = run(capsys, bare_model, "--ids", "1,2,3", "--ids", "4 5", "--max-new-tokens", 3)
    (first, second) = describe(capsys, bare_model, "--ids", "1,2,3", "--ids", "4 5", "--max-new-tokens", 3)
    assert first["prompt"] is None and first["text"] is None
    printed = [" ".join(map(str, entry["ids"])) for entry in (first, second)]
    assert out.splitlines() == ["--- 1 ---", printed[0], "--- 2 ---", printed[1]]


def test_prompts_from_a_file(model, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("ab\n\n  c d\n")
    entries = describe(capsys, model, "--prompts-file", file, "--prompt", "x", "--max-new-tokens", 2)
    assert [entry["prompt"] for entry in entries] == ["x", "ab", "  c d"]


@pytest.mark.parametrize("separator", list("\u2028\u2029\x85\x0b\x0c\x1c\r"))
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "marked"])
def test_lines_of_prompts_end_at_newlines_alone(tmp_path, separator, mark):
    texts, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    inside = f"a{separator}b"
    texts.write_bytes(f"{mark}{inside}\r\n\nc\n".encode())
    objects.write_bytes(f'{mark}{json.dumps({"prompt": inside}, ensure_ascii=False)}\n{{"prompt": "c"}}'.encode())
    assert _prompts_of(texts) == _prompts_of(objects) == [inside, "c"]


def test_sampling_repeats_with_the_seed(model, capsys):
    def sampled(*options) -> list[int]:
        return describe(capsys, model, "--ids", "1", "--max-new-tokens", 12, "--temperature", 1, *options)[0]["ids"]

    assert sampled("--seed", 1) == sampled("--seed", 1) != sampled("--seed", 2)
    greedy = describe(capsys, model, "--ids", "1", "--max-new-tokens", 12)[0]["ids"]
    assert sampled("--top-k", 1) == sampled("--top-p", 1e-6) == greedy


def test_a_text_ends_before_its_eos(model, config, tmp_path, capsys):
    (entry,) = describe(capsys, model, "--ids", "1,2", "--max-new-tokens", 8)
    third = entry["ids"][2]
    first = entry["ids"].index(third)
    assert not entry["stopped"]
    (stopped,) = describe(capsys, model, "--ids", "1,2", "--max-new-tokens", 8, "--stop-ids", third)
    assert stopped["ids"] == entry["ids"][:first] and stopped["stopped"]

    settings = tmp_path / "generation_config.json"
    for name, eos in (("one", third), ("several", [EOS, third])):
        settings.write_text(json.dumps({"eos_token_id": eos}))
        path = write_model(tmp_path / name, config, random_leaves(config), (settings,))
        assert describe(capsys, path, "--ids", "1,2", "--max-new-tokens", 8)[0] == {
            **stopped, "prompt": None, "text": None, "reason": "eos", "ended_by": str(third),
        }  # fmt: skip


def test_a_stop_string_ends_a_text_across_its_tokens(model, capsys):
    free = describe(capsys, model, "--prompt", "ab", "--prompt", "c", "--max-new-tokens", 24)
    assert [entry["reason"] for entry in free] == ["length"] * 2 and free[0]["ended_by"] is None
    text = free[0]["text"]
    stop = text[3:6]  # bytes are tokens: at least three of them
    options = ("--max-new-tokens", 24, "--stop", "never", "--stop", stop)
    ended, other = describe(capsys, model, "--prompt", "ab", "--prompt", "c", *options)
    assert stop not in free[1]["text"] and other == free[1]
    assert ended["text"] == text[: text.index(stop)] and ended["reason"] == "stop" and ended["ended_by"] == stop
    assert ended["stopped"] and len(ended["ids"]) < 24 and ended["ids"] == free[0]["ids"][: len(ended["ids"])]
    assert describe(capsys, model, "--prompt", "ab", *options) == [ended]


def test_why_texts_ended_and_how_fast_they_came_is_said_on_standard_error(model, capsys):
    free, other = (describe(capsys, model, "--ids", ids, "--max-new-tokens", 12)[0]["ids"] for ids in ("1,2", "3"))
    stop = next(token for token in free if token not in [free[0], *other])

    def said(*options) -> list[str]:
        run = ["generate", model, "--ids", "1,2", "--max-new-tokens", 12, *options]
        assert cli.main(list(map(str, run))) == 0
        return capsys.readouterr().err.splitlines()

    why, speed = said()
    assert why == "moe-jax: ended at 12 tokens (--max-new-tokens)"
    assert re.fullmatch(
        r"moe-jax: 12 tokens in [\d.]+ s: the first after [\d.]+ s, [\d.]+ a second once compiled", speed
    )
    why, _ = said("--stop-ids", stop)
    assert why.startswith("moe-jax: ended with ") and why.endswith(" (--stop-ids)")
    why, speed = said("--stop-ids", free[0])
    assert why.startswith("moe-jax: ended at once with ") and why.endswith("(--stop-ids): nothing was added")
    assert re.fullmatch(r"moe-jax: 1 token in [\d.]+ s", speed)
    several = said("--ids", "1,2", "--ids", "3", "--ids", "1,2", "--stop-ids", stop)
    assert [line.split(" ended ")[0] for line in several[:2]] == ["moe-jax: prompts 1-2, 4", "moe-jax: prompt 3"]


@pytest.mark.parametrize(("said", "printed"), [(" pieces", "some pieces\n"), (None, "")])
def test_the_line_of_a_text_that_is_interrupted_is_ended(model, monkeypatch, capsys, said, printed):
    def interrupted(model, prompts, wanted, on_text, *, chat):
        if said is not None:
            on_text(0, said)
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_jax.api.generate.continue_prompts", interrupted)
    assert cli.main(["generate", str(model), "--prompt", "some", "--stream"]) == 130
    captured = capsys.readouterr()
    assert captured.out == printed and captured.err == "moe-jax: interrupted by SIGINT\n"


def test_streaming_prints_what_is_printed_at_once(model, data_dir, capsys):
    stories = data_dir / "weights" / "stories260K" / "hf"
    for path, prompt in ((model, "ab"), (stories, "Once upon"), (stories, "")):
        options = (path, "--prompt", prompt, "--max-new-tokens", 40)
        assert run(capsys, *options, "--stream") == run(capsys, *options)


def test_a_terminal_is_given_the_text_piece_by_piece(model, monkeypatch):
    class Terminal(io.StringIO):
        flushed: list[str] = []

        def isatty(self):
            return True

        def flush(self):
            if self.getvalue() not in self.flushed:
                self.flushed.append(self.getvalue())

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert cli.main(["generate", str(model), "--prompt", "ab", "--max-new-tokens", "40"]) == 0
    assert len(terminal.flushed) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(terminal.flushed))


def test_prompts_from_a_file_of_json_lines(model, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab\\nc", "id": 7}\n\n{"prompt": "d"}\n')
    entries = describe(capsys, model, "--prompts-file", file, "--max-new-tokens", 2)
    assert [entry["prompt"] for entry in entries] == ["ab\nc", "d"]
    for line in ('{"prompt": 1}', '"ab"', "{"):
        file.write_text(line)
        assert cli.main(["generate", str(model), "--prompts-file", str(file)]) == 2
        assert "prompts.jsonl, line 1" in capsys.readouterr().err


def test_beyond_the_context_there_is_a_note(model, capsys):
    assert cli.main(["generate", str(model), "--ids", "1", "--max-new-tokens", "64"]) == 0
    assert "note: 65 positions, but the model was trained for 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to continue: give --prompt, --prompts-file or --ids"),
        (("--ids", "1,b"), "token ids joined"),
        (("--ids", "258"), "[258] lie outside the vocabulary of 258"),
        (("--ids", "1", "--stop-ids", "999"), "stop_ids [999] lie outside the vocabulary of 258"),
        (("--ids", ""), "token in every"),
        (("--ids", "9999999999"), "lie outside the vocabulary of 258"),
        (("--ids", "1", "--max-new-tokens", "0"), "max_new_tokens=0 must be a positive"),
        (("--ids", "1", "--temperature", "-1"), "temperature=-1.0 must be 0"),
        (("--ids", "1", "--top-p", "2"), "top_p=2.0 must lie in (0, 1]"),
        (("--ids", "1", "--top-k", "0"), "top_k=0 must be a positive"),
        (("--prompt", "a", "--stop", ""), "least one character"),
        (("--prompt", "a", "--prompt", "b", "--stream"), "--stream is for one"),
        (("--prompt", "a", "--json", "--stream"), "--stream is for one"),
        (("--prompts-file", "absent.txt"), "no prompts at absent.txt"),
    ],
)
def test_bad_input_is_refused(options, message, model, capsys):
    assert cli.main(["generate", str(model), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("moe-jax: error: ") and err.count("\n") == 1


def test_a_text_for_a_model_without_tokenizer_is_refused(bare_model, capsys):
    assert cli.main(["generate", str(bare_model), "--prompt", "a"]) == 2
    err = capsys.readouterr().err
    assert "has no tokenizer.json" in err and "--ids" in err and err.count("\n") == 1
    assert cli.main(["generate", str(bare_model), "--ids", "1", "--stop", "a"]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\n \n", b"\xff\xfe"])
def test_bad_files_of_prompts_are_refused(content, model, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_bytes(content)
    assert cli.main(["generate", str(model), "--prompts-file", str(tmp_path / "prompts.txt")]) == 2
    err = capsys.readouterr().err
    assert "prompts.txt" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1", "generation_config.json is not valid JSON"),
        ("[1]", "generation_config.json holds a JSON list"),
        ('{"eos_token_id": "x"}', "eos_token_id 'x' is no token"),
        ('{"eos_token_id": [1, 258]}', "eos_token_id 258 is no token"),
        ('{"eos_token_id": true}', "eos_token_id True is no"),
    ],
)
def test_a_broken_generation_config_is_refused(config, tmp_path, capsys, content, message):
    (tmp_path / "generation_config.json").write_text(content)
    path = write_model(tmp_path / "model", config, random_leaves(config), (tmp_path / "generation_config.json",))
    assert cli.main(["generate", str(path), "--ids", "1"]) == 2
    assert message in capsys.readouterr().err


def test_on_a_cpu_weights_of_many_rows_are_widened_once_and_not_for_every_token(config, tmp_path, monkeypatch):
    narrow = dataclasses.replace(config, dtype="bfloat16")
    model = write_model(tmp_path / "narrow", narrow, random_leaves(narrow))
    stored = moe_jax.generate(moe_jax.load(model), [5, 6, 7], max_new_tokens=6)
    assert moe_jax.generate(model, [5, 6, 7], max_new_tokens=6).ids == stored.ids
    source = open_source(model)
    assert loading.dtype_for_generation(source, "float32") == "float32"
    assert loading.dtype_for_generation(source, "float32", rows=9) == "float32"
    assert loading.dtype_for_generation(source, "float32", rows=1) is None
    assert loading.dtype_for_generation(source, "bfloat16") is None
    monkeypatch.setattr(loading, "available_memory", lambda: 1000)
    assert loading.dtype_for_generation(source, "float32") is None


def test_on_a_cpu_experts_stay_as_they_are_stored(model):
    mixture = moe_jax.upcycle(model, experts=2, every=1)
    narrow = {dtype: moe_jax.load(mixture, dtype=dtype).source for dtype in ("bfloat16", "float16")}
    assert loading.dtype_for_generation(narrow["bfloat16"], "float32") is None
    assert loading.dtype_for_generation(narrow["float16"], "float32") == "float32"


def test_a_rate_that_would_count_compilation_is_not_said():
    few, more = ([(1.0 + 0.1 * i, 1) for i in range(count)] for count in (1 + FIRST_BLOCK, 11 + FIRST_BLOCK))
    assert _speed(few).per_second is None and _speed(more).per_second == pytest.approx(10)
    assert _show_speed(_speed(few)).endswith("the first after 1.0 s")
    assert _show_speed(_speed(more)).endswith(", 10.0 a second once compiled")
