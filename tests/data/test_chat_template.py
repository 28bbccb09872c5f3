"""Chat templates: text and learnt spans as Transformers has them, where a template lies, what is refused, bounds."""

import concurrent.futures
import json
import multiprocessing
import resource

import pytest

from moe_jax.core import template_sandbox
from moe_jax.core.errors import InputError
from moe_jax.data.chat_template import ChatTemplate, check_messages, find_chat_template, load_chat_template
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.chat_templates import REASONING, SPECIAL, STYLES, SYSTEM, TURNS, marked, plain


def transformers_tokenizer(tmp_path, template):
    import transformers

    file = str(byte_tokenizer(tmp_path / "tokenizer.json"))
    return transformers.PreTrainedTokenizerFast(tokenizer_file=file, chat_template=template, **SPECIAL)


def learnt(document):
    return [document.text[begin:end] for begin, end in document.spans]


def conversations(style):
    yield from (TURNS[:1], TURNS[:2], TURNS)
    if style != "gemma":
        yield from ([SYSTEM, *TURNS[:2]], [SYSTEM, *TURNS])


@pytest.mark.parametrize("style", STYLES)
def test_text_and_learnt_spans_are_those_of_transformers(tmp_path, style):
    theirs = transformers_tokenizer(tmp_path, marked(style))
    ours, unmarked = (ChatTemplate(text, special_tokens=SPECIAL) for text in (marked(style), plain(style)))
    for messages in conversations(style):
        for prompt in (False, True):
            want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours(messages, add_generation_prompt=prompt) == want
            assert unmarked(messages, add_generation_prompt=prompt) == want
        if messages[-1]["role"] != "assistant":
            continue
        encoded = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids = [id for id, learns in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if learns]
        [document] = ours.scored(messages)
        assert "".join(learnt(document)) == theirs.decode(ids)
        assert len(document.spans) == sum(message["role"] == "assistant" for message in messages)
        assert unmarked.scored(messages) == [document]


@pytest.mark.parametrize("style", STYLES)
def test_what_is_learnt_begins_after_the_prompt_and_ends_with_the_turn(style):
    template = ChatTemplate(plain(style), special_tokens=SPECIAL)
    [document] = template.scored(TURNS)
    ends = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
    for index, (begin, end) in zip((1, 3, 5), document.spans, strict=True):
        assert document.text[:begin] == template(TURNS[:index], add_generation_prompt=True)
        assert document.text[begin:end].strip() == TURNS[index]["content"] + ends.get(style, "</s>")


def test_a_turn_that_no_token_ends_is_learnt_with_its_line_end():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    [document] = template.scored(TURNS[:4])
    assert learnt(document) == ["It is 4.\n", "8, and here is a\nsecond line.\n"]


def test_where_the_past_is_written_in_another_way_every_turn_is_a_document():
    template = ChatTemplate(REASONING)
    thinking = [dict(m) for m in TURNS[:4]]
    thinking[1]["content"] = "<think>\ntwo and two\n</think>\n\nIt is 4."
    thinking[3]["content"] = "<think>twice</think>8"
    first, second = template.scored(thinking)
    assert learnt(first) == ["<think>\ntwo and two\n</think>\n\nIt is 4.<|im_end|>"]
    assert learnt(second) == ["<think>\ntwice\n</think>\n\n8<|im_end|>"]
    assert first.text == template(thinking[:2]) and second.text == template(thinking)
    assert "two and two" not in second.text


def test_a_turn_whose_beginning_cannot_be_found_is_an_error():
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{% endif %}",
        where="their template",
    )
    with pytest.raises(InputError, match="their .* message 2 begins: .*<think>"):
        template.scored(TURNS[:2])
    with pytest.raises(InputError, match='without "assistant" has nothing'):
        template.scored(TURNS[:1])


def test_json_dates_and_loop_controls_are_those_of_transformers(tmp_path):
    text = (
        "{{ messages[0] | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}{% for m in messages %}"
        "{% if loop.index > 1 %}{% break %}{% endif %}{{ m.extra.a[0] }}{% endfor %}\n    {% if tools is none %}\n  x\n"
        "    {% endif %}{{ strftime_now('%Y') }}{{ unk_token }}{{ messages[0].get('nothing') }}{{ nothing }}"
    )
    messages = [{"role": "user", "content": "<b>é漢'\"", "extra": {"a": [1, 2.5, None, True]}}, TURNS[1]]
    theirs = transformers_tokenizer(tmp_path, text).apply_chat_template(messages, tokenize=False)
    assert ChatTemplate(text, special_tokens=SPECIAL)(messages) == theirs


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "{{ bos_token }}A", "bos_token": "<s>"}}, "<s>A"),
        ({"tokenizer_config.json": {"chat_template": "{{ bos_token }}", "bos_token": {"content": "<b>"}}}, "<b>"),
        (
            {
                "tokenizer_config.json": {"chat_template": "{{ bos_token }}{{ eos_token }}", "eos_token": None},
                "special_tokens_map.json": {"bos_token": "<1>", "eos_token": {"content": "<2>"}},
            },
            "<1><2>",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
                }
            },
            "D",
        ),
        ({"tokenizer_config.json": {"chat_template": "old"}, "chat_template.jinja": "new"}, "new"),
        ({"tokenizer_config.json": {}}, None),
        ({}, None),
    ],
)
def test_where_a_tokenizer_keeps_its_template(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    found = find_chat_template(tmp_path / "tokenizer.json")
    assert (found and found(TURNS)) == expected
    if expected is None:
        with pytest.raises(InputError, match="has no chat template: neither chat_template.jinja nor"):
            load_chat_template(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"chat_template": 3}, "tokenizer_config.json is 3, expected a text"),
        ({"chat_template": [{"name": "rag", "template": ""}]}, "name \"default\", but \\[\\'rag\\'\\]"),
        ({"chat_template": "{% for %}"}, r"chat template \(line 1\)"),
        ({"chat_template": "{{ x }}\n{% end %}"}, r"chat template \(line 2\)"),
        ({"chat_template": "x" * (1 << 18) + "x"}, "is .* chat template: it .* than 262,144 characters"),
    ],
)
def test_a_template_that_is_none_is_one_line(tmp_path, content, complaint):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=complaint) as error:
        find_chat_template(tmp_path / "tokenizer.json")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hello", "messages, got 'hello'"),
        ([], "list of messages"),
        (["hello"], "message 1 is 'hello'"),
        ([{"content": "a"}], "message 1 has the role"),
        ([*TURNS[:1], {"role": "asistant", "content": "a"}], "message 2 has the role 'asistant' .did you mean 'assist"),
        ([{"role": "user"}], "message 1 has the content"),
        ([{"role": "user", "content": {"type": "text", "text": "a"}}], "message 1 has the content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "holds a picture"),
        ([{"role": "user", "content": "\ud800"}], "message 1 holds one half"),
        ([{"role": "user", "content": "a", "x": object()}], "expected what JSON can hold"),
        ([{"role": "user", "content": "x" * 9_000_000}] * 2, "more than 4,194,304 characters"),
        ([{"role": "user", "content": "a", "x": {"y": "x" * 5_000_000}}], "more than 4,194,304 characters"),
        ([{"role": "user", "content": "a", "x": [0] * 70_000}], "more than 65,536 values"),
        ([{"role": "user", "content": ""}] * 20_000, "more than 65,536 values"),
    ],
)
def test_messages_that_are_none_are_one_line(messages, complaint):
    with pytest.raises(InputError, match=complaint):
        check_messages(messages)


def test_a_call_of_a_tool_needs_no_content_and_a_content_may_be_parts():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    template = ChatTemplate("{{ messages[0].content[0].text }}{{ messages[1].tool_calls[0].function.name }}")
    assert template([parts, call]) == "af"


WRITES_PARTS = (
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'image' %}<image>{% endif %}{% endfor %}"
)
WRITES_TEXT = "{{ message.content }}"
WRITES_BOTH = f"{{% if message.role == 'system' %}}{WRITES_TEXT}{{% else %}}{WRITES_PARTS}{{% endif %}}"


def every_message(how: str) -> str:
    return f"{{% for message in messages %}}{{{{ message.role }}}}:{how}|{{% endfor %}}"


@pytest.mark.parametrize("how", [WRITES_PARTS, WRITES_TEXT, WRITES_BOTH])
@pytest.mark.parametrize("in_parts", [False, True])
def test_contents_are_texts_or_parts_as_the_template_takes_them(how, in_parts):
    def content(text: str):
        return [{"type": "text", "text": text}] if in_parts else text

    system = {"role": "system", "content": "be short"}
    messages = [system, {"role": "user", "content": content("why")}, {"role": "assistant", "content": content("so")}]
    template = ChatTemplate(every_message(how))
    assert template(messages) == "system:be short|user:why|assistant:so|"
    assert [one.text[slice(*one.spans[0])] for one in template.scored(messages)] == ["assistant:so|"]


def test_parts_are_lines_of_a_text_for_a_template_of_texts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(every_message(WRITES_TEXT))([{"role": "user", "content": parts}]) == "user:a\nb|"


def test_what_a_template_refuses_is_one_line(tmp_path):
    with pytest.raises(InputError, match="refuses the messages: There is"):
        ChatTemplate(plain("gemma"), special_tokens=SPECIAL)([SYSTEM, *TURNS])
    with pytest.raises(InputError, match="refuses the messages: Roles must"):
        ChatTemplate(plain("mistral"), special_tokens=SPECIAL)([TURNS[0], TURNS[0]])


GROWS = "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
LISTS = GROWS.replace("STEP", "[ns.x, ns.x]")
ENDLESS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ (messages * 99999999) | length }}",
    "{{ (10 ** (10 ** 10)) is odd }}",
    GROWS.replace("STEP", "ns.x ~ ns.x"),
    GROWS.replace("STEP", "ns.x + ns.x"),
    GROWS.replace("STEP", "ns.x | replace('a', 'aa')"),
    GROWS.replace("STEP", "ns.x.replace('a', 'aa')"),
    GROWS.replace("STEP", "[ns.x, ns.x] | join"),
    GROWS.replace("STEP", "''.join([ns.x, ns.x])"),
    GROWS.replace(" = STEP %}", " %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    LISTS + "{{ ns.x }}",
    LISTS + "{{ ns.x | tojson }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'a'.center(10 ** 10) }}",
    "{{ 'a' | indent(10 ** 10) }}",
    "{{ messages | tojson(indent=10 ** 10) }}",
)


@pytest.mark.parametrize("text", ENDLESS)
def test_templates_end_in_bounded_time_and_memory(text, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="does not end: |writes more than 4,194,304 characters") as error:
        ChatTemplate(text)(TURNS)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)  # KiB
    monkeypatch.undo()
    assert ChatTemplate("{{ messages | length }}")(TURNS) == str(len(TURNS))  # those that come after it are rendered


def test_values_are_bounded_before_they_are_handed_over(monkeypatch):
    monkeypatch.setattr(template_sandbox, "_MAX_REQUEST", 10_000)
    template = ChatTemplate("{{ messages | length }}{{ tools | length }}")
    assert template(TURNS, tools=["a" * 100]) == f"{len(TURNS)}1"
    with pytest.raises(InputError, match="more than 10,000 bytes"):
        template(TURNS, tools=[{"name": "a" * 9_999}])
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(template_sandbox.TemplateFails, match="nested too deeply"):
        template_sandbox.Template("{{ x }}").render({"x": deep})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='x') }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}{{ ns.__class__.__mro__ }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ x.y.z }}", "'x' is undefined"),
        ("{{ 10 ** 99999 }}", "4300 digits"),
        ("{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}", "writes more than 4,194,304 characters"),
        ("{% set y %}{% generation %}a{% endgeneration %}{% endset %}b{{ y }}", "or a block"),
    ],
)
def test_templates_reach_nothing_of_python(text, complaint):
    with pytest.raises(InputError, match=complaint) as error:
        ChatTemplate(text)(TURNS)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_threads_and_workers_get_their_own_texts():
    template = ChatTemplate("{{ messages[0].content }}")
    texts = [f"text {number} " * number for number in range(1, 60)]

    def render(text):
        return template([{"role": "user", "content": text}])

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(render, texts)) == texts
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # a worker of the data pipeline
        assert pool.map(template, [[{"role": "user", "content": text}] for text in texts[:3]]) == texts[:3]
