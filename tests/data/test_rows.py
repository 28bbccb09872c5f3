"""Rows in the forms of usual data sets: all that they hold is used, known to say nothing, or an error that names it."""

import datetime
import json

import pytest

from moe_jax.core.errors import InputError
from moe_jax.data.chat_template import ChatTemplate
from moe_jax.data.rows import RowReader
from moe_jax.data.sections import FieldsSection
from moe_jax.data.table_rows import TableRows

TEMPLATE = """\
{%- if tools %}[{{ tools | tojson }}]{% endif -%}
{%- for m in messages -%}
{{ '<' + m.role + '>' + m.content }}
{%- for call in m.tool_calls %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor -%}
{{ '</>' }}
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""
MARKED = TEMPLATE.replace("+ m.content }}", "}}{% generation %}{{ m.content }}{% endgeneration %}")


def read(row, *, source=TEMPLATE, **how) -> list[str]:
    """The texts of a row, with brackets around what is scored."""
    reader = RowReader(template=lambda: ChatTemplate(source), **how)
    found = []
    for example in reader(row):
        text = example.text
        spans = example.spans if example.spans is not None else [(example.prompt_chars, len(text))]
        for begin, end in reversed(spans):
            text = f"{text[:begin]}[[{text[begin:end]}]]{text[end:]}"
        found.append(text)
    return found


def refused(row, **how) -> str:
    with pytest.raises(InputError) as error:
        read(row, **how)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    return str(error.value)


U, A = ({"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a")))
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ONE = "<user>q</><assistant>[[a</>]]"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "q", "completion": "a"}, "q[[a]]"),
        ({"instruction": "do", "input": "q", "output": "a"}, "do\nq\n[[a]]"),
        ({"instruction": "do", "input": "", "output": "a"}, "do\n[[a]]"),
        ({"instruction": "do", "output": "a", "input": None, "id": 3, "source": "b", "system": ""}, "do\n[[a]]"),
        ({"instruction": "do", "input": "q", "output": "a", "text": "Below: do q a"}, "do\nq\n[[a]]"),
        ({"prompt": "q", "response": "a", "tools": "[]", "chosen": [], "reasoning": ""}, "q[[a]]"),
        ({"text": "a", "url": "b", "whatever": [1]}, "[[a]]"),
        ({"text": "a", "data": "wiki", "output": "b", "completion": "c"}, "[[a]]"),
    ],
)
def test_texts_and_pairs(row, expected):
    assert read(row) == [expected]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [U, A], "prompt": " q", "prompt_id": "x"}, ONE),
        ({"data": ["q", "a"], "id": "0"}, ONE),
        ({"messages": json.dumps([U, A])}, ONE),
        ({"messages": [U, A], "system": "s"}, "<system>s</>" + ONE),
        ({"messages": [{"role": "system", "content": "s"}, U, A], "system": "s"}, "<system>s</>" + ONE),
        ({"messages": [U, A], "system": "", "tools": []}, ONE),
        ({"messages": [{"role": "system", "content": ""}, U, A], "system": "s"}, "<system>s</>" + ONE),
        ({"messages": [U, A], "tools": '{"f": 1}'}, '[[{"f": 1}]]' + ONE),
        ({"prompt": json.dumps([U]), "completion": json.dumps([A])}, ONE),
        ({"messages": [U, A], "tools": [{"f": 1}]}, '[[{"f": 1}]]' + ONE),
        ({"conversations": [U, A], "tools": '[{"f": 1}]'}, '[[{"f": 1}]]' + ONE),
        ({"prompt": [U, A, U], "completion": [A]}, "<user>q</><assistant>a</>" + ONE),
        ({"messages": [U, {**A, "weight": 0}, U, {**A, "weight": 1}]}, "<user>q</><assistant>a</>" + ONE),
        ({"messages": [U, {**A, "train": True}, U, {**A, "train": False}]}, ONE + "<user>q</><assistant>a</>"),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": "é"}}'},
                    {"from": "observation", "value": "1"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            '<user>q</><assistant>[[(f {"x": "é"})</>]]<tool>1</><assistant>[[a</>]]',
        ),
    ],
)
def test_conversations(row, expected):
    assert read(row) == [expected]
    assert read({**row, "url": None}) == [expected]


def test_a_conversation_of_which_nothing_is_to_be_learnt_gives_nothing():
    assert read({"messages": [U, {**A, "weight": 0}]}) == []


def test_marked_parts_of_turns_that_are_not_learnt():
    messages = [{**A, "content": "b", "train": False}, U, A]
    template = MARKED.replace("{% generation %}", "{% if m.role == 'assistant' %}{% generation %}").replace(
        "{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    )
    assert read({"messages": messages}, source=template) == ["<assistant>b</><user>q</><assistant>[[a]]</>"]


@pytest.mark.parametrize("key", ["system", "tools"])
def test_other_names_of_what_is_beside_messages(key):
    row = {"talk": [U, A], "mine": "s" if key == "system" else [1], key: "other", "any": 3}
    expected = "<system>s</>" if key == "system" else "[[1]]"
    assert read(row, fields=FieldsSection(messages="talk", **{key: "mine"})) == [expected + ONE]
    assert read(row, fields=FieldsSection(messages="talk")) == [ONE]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"messages": [U, A], "documents": ["d"]}, "'documents' beside 'messages'"),
        ({"prompt": "q", "response": "a", "rejected": "b"}, "'rejected' beside 'prompt' and 'response'"),
        ({"prompt": "q", "response": "a", "system": "s"}, "'system' beside 'prompt'"),
        ({"messages": [U, A], "prompt": "another"}, "'prompt' is 'another'"),
        ({"messages": [{"role": "system", "content": "t"}, U, A], "system": "s"}, "'system' is 's'"),
        ({"messages": [U, A], "tools": 3}, "'tools' is"),
        ({"messages": [U, {**A, "weight": 0.5}]}, "message 2 has the weight 0.5"),
        ({"messages": "[1"}, "'messages'"),
        ({"prompt": [U], "completion": [U]}, "'completion' has no message of the \"assistant\""),
        ({"conversations": [{"from": "function_call", "value": "f(x)"}, A]}, "function_call in message 1"),
        ({"conversations": [{"from": "function_call", "value": '{"f": 1}'}, A]}, "function_call in message 1"),
        ({"conversations": [{"from": "function_call", "value": datetime.date(2026, 1, 1)}, A]}, "in message 1"),
    ],
)
def test_what_would_be_lost_is_named(row, named):
    assert named in refused(row)


def test_tools_that_the_template_never_writes():
    bare = TEMPLATE.partition("\n")[2]
    assert "never writes the tools" in refused({"messages": [U, A], "tools": [1]}, source=bare)


def test_calls_that_the_template_never_writes():
    bare = TEMPLATE.replace("{%- for call in m.tool_calls %}", "{%- for call in [] %}")
    assert "never writes tool calls, which message 2 has" in refused({"messages": [U, CALLS]}, source=bare)


def test_one_call_does_not_decide_how_another_is_written():
    def called(arguments: str) -> dict:
        return {**CALLS, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]}

    result = {"role": "tool", "content": "called with {'x': 'é'}"}
    (text,) = read({"messages": [U, called('{"x": "é"}'), result, called("{}"), A]})
    assert '(f {"x": "é"})' in text and "(f {})" in text
    # As Transformers passes a text on to a template that takes one.
    own = TEMPLATE.replace("arguments | tojson", "arguments if call.function.arguments is string else 0")
    assert '(f {"a": 1.10, "b":1e5})' in read({"messages": [U, called('{"a": 1.10, "b":1e5}')]}, source=own)[0]
    # An object, for one that adds texts to it.
    adds = TEMPLATE.replace("arguments | tojson", "arguments + '!'")
    assert '(f {"x": "é"}!)' in read({"messages": [U, CALLS]}, source=adds)[0]


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ('(f {"x": "é"})', TEMPLATE),
        ('(f {"x":"é"})', TEMPLATE.replace("arguments | tojson", "arguments")),
        ('(f {"x":"é"}!)', TEMPLATE.replace("arguments | tojson", "arguments + '!'")),
        ("(f x)", TEMPLATE.replace("arguments | tojson", "arguments | items | first | first")),
    ],
)
def test_arguments_as_a_text_are_quoted_once(written, source):
    text = {**CALLS, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x":"é"}'}}]}
    assert read({"messages": [U, text]}, source=source) == [f"<user>q</><assistant>[[{written}</>]]"]


def test_a_table_adds_no_keys_and_is_read_where_it_matters(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    def call(**arguments) -> dict:
        return {**CALLS, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]}

    rows = [{"messages": [U, call(x=1)], "id": 1, "system": None}, {"messages": [U, call(y="z")], "system": "s"}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    table = TableRows(tmp_path / "a.parquet", "parquet", RowReader(template=lambda: ChatTemplate(TEMPLATE)))
    assert table[0][0].text == '<user>q</><assistant>(f {"x": 1})</>'
    assert table[1][0].text == '<system>s</><user>q</><assistant>(f {"y": "z"})</>'
    parquet.write_table(arrow.Table.from_pylist([{"messages": [U, A], "more": "b"}]), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="row 1: 'more' beside 'messages'"):  # before anything is copied
        TableRows(tmp_path / "b.parquet", "parquet", RowReader(template=lambda: ChatTemplate(TEMPLATE)))


def test_a_model_with_an_encoder_takes_no_conversation_for_a_pair():
    said = refused({"prompt": [U], "completion": [A]}, kinds=("pair",))
    assert "'prompt' holding a list that should be a string" in said
