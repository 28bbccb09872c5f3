"""JSON and TOML within limits: what is read, and what is refused in one short line, quickly and in little memory."""

import time
import tracemalloc

import pytest

from moe_jax.core.errors import InputError
from moe_jax.files.json_toml import ANYTHING, MAX_DEPTH, parse_json, parse_toml, read_json, read_json_object, read_toml


def json_of(text: str | bytes, **options):
    return parse_json(text if isinstance(text, bytes) else text.encode(), where="a.json", **options)


def toml_of(text: str):
    return parse_toml(text, where="a.toml")


def test_json_is_read_as_it_is():
    text = '{"a": [-2.5, true, null, "é\\ud83d\\ude00"], "b": {}, "big": [9223372036854775807, -9223372036854775808]}'
    expected = {"a": [-2.5, True, None, "é😀"], "b": {}, "big": [2**63 - 1, -(2**63)]}
    assert json_of(text) == json_of(b"\xef\xbb\xbf" + text.encode()) == expected
    assert json_of("[" * MAX_DEPTH + "]" * MAX_DEPTH)


def test_what_is_unusual_is_read_where_it_is_allowed():
    assert json_of("[1e999, Infinity, -Infinity]", allow=["nonfinite"]) == [float("inf"), float("inf"), -float("inf")]
    # The largest length that Transformers writes into tokenizer_config.json.
    assert json_of("1000000000000000019884624838656", allow=["large integers"]) == 1000000000000000019884624838656
    assert json_of('"\\ud800"', allow=["surrogates"]) == "\ud800"
    assert json_of('[NaN, "\\ud800", 9223372036854775808]', allow=ANYTHING)[1:] == ["\ud800", 2**63]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a.json is not valid JSON: Expecting property name"),
        ("", "a.json is not valid JSON: Expecting value"),
        (b'"\xff"', "a.json is not valid JSON: 'utf-8' codec"),
        (b'"\xed\xa0\x80"', "a.json is not valid JSON: 'utf-8' codec"),
        ('{"a": 1, "b": 2, "a": 3}', "a.json: the key 'a'"),
        ('[{"x": {"a": 1, "a": 1}}]', "a.json: the key 'a'"),
        ("9223372036854775808", "a.json: the integer '9223372036854775808' does not fit into 64 bits"),
        ("-9223372036854775809", "fit into 64 bits"),
        ("1" * 5000, "fit into 64 bits"),
        ("NaN", "a.json: 'NaN' is not a"),
        ("[-Infinity]", "a.json: '-Infinity' is not a"),
        ("1e999", "a.json: '1e999' is not a"),
        ('["\\ud800"]', r"a.json: a string holds '\ud800'"),
        ('{"\\uDFFF": 1}', "a.json: a string holds '\\udfff'"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "a.json is nested more than 100 levels deep"),
        ('{"a":' * 50_000, "a.json is nested more than 100 levels deep"),
        ("[" * 5_000_000, "a.json has more than 1,000,000 values"),
        ("[{}" + ",{}" * 2_000_000 + "]", "a.json has more than 1,000,000 values"),
        ('{"' + "k" * 5_000_000 + '": 1, "' + "k" * 5_000_000 + '": 2}', "more than once"),
    ],
)
def test_what_is_wrong_in_json_is_one_short_line(text, message):
    begun = time.monotonic()
    with pytest.raises(InputError) as error:
        json_of(text)
    assert message in str(error.value)
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)
    assert time.monotonic() - begun < 5


def test_what_is_refused_takes_little_memory():
    """At the limit of values, each of the costliest kind."""
    text = b"[" + b"[]," * 499_000 + b"nothing"
    tracemalloc.start()
    with pytest.raises(InputError, match="is not valid JSON"):
        json_of(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b.\"c.d\".'e' = 1.5", {"a": {"b": {"c.d": {"e": 1.5}}}}),
        ("s = '" + "a." * 500 + "'", {"s": "a." * 500}),
        ('s = """\n' + "a." * 500 + '"""', {"s": "a." * 500}),
        ("# " + "a." * 500 + "\nx = [0.1, 0.2, 1.5]", {"x": [0.1, 0.2, 1.5]}),
    ],
)
def test_toml_is_read_as_it_is(text, expected):
    assert toml_of(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = = 3", "a.toml is not TOML: "),
        ("a = 1\na = 2", "a.toml is not TOML: "),
        ("a = " + "1" * 5000, "a.toml is not TOML: "),
        (".".join("a" * 50_000) + " = 1", "a.toml: a key has more than 16 parts"),
        ("[" + " . ".join(['"a"'] * 20) + "]", "a.toml: a key has more than 16 parts"),
        ("x = {" + ".".join("a" * 20) + " = 1}", "a.toml: a key has more than 16 parts"),
        ("a = " + "[" * 50_000 + "]" * 50_000, "a.toml is nested more than 100 levels deep"),
        ("a = " + "[" * 101 + "]" * 101, "a.toml is nested more than 100 levels deep"),
        ("a = " + "{a=" * 50_000, "a.toml is nested more than 100 levels deep"),
        ("a" * 1_000_000, "a.toml is not TOML: "),
    ],
)
def test_what_is_wrong_in_toml_is_one_short_line(text, message):
    begun = time.monotonic()
    with pytest.raises(InputError) as error:
        toml_of(text)
    assert str(error.value).startswith(message)
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)
    assert time.monotonic() - begun < 5


def test_files(tmp_path):
    file = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError, match="a.json does not exist"):
        read_json_object(file)
    file.write_text("[1]")
    assert read_json(file) == [1]
    with pytest.raises(InputError, match="a.json holds a JSON list"):
        read_json_object(file)
    file.write_text('{"a": 1}')
    assert read_json_object(file) == {"a": 1}
    with pytest.raises(InputError, match="a.json has more than 4 bytes"):
        read_json(file, max_bytes=4)
    file.write_text("a = 'é'")
    assert read_toml(file) == {"a": "é"}
    file.write_bytes(b"a = '\xff'")
    with pytest.raises(InputError, match="a.json is not TOML: 'utf-8' codec"):
        read_toml(file)
    with pytest.raises(InputError, match="regular file"):
        read_json(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nsteps = 3\nseq = 1\nsteps = 4", "'steps' stands on line 2 and on line 4"),
        ("steps = 3\n[a]\n[train]\nx = 1\n[a]\n", "'[a]' stands on line 2 and on line 5"),
    ],
)
def test_a_key_that_is_given_twice_is_named_with_its_lines(text, said):
    with pytest.raises(InputError) as error:
        parse_toml(text, where="a.toml")
    assert str(error.value).endswith(said)
