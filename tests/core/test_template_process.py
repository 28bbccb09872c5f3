"""What differs between chat templates and prompts of tasks; in this process, without the limits of the other one."""

import datetime

import jinja2
import jinja2.sandbox
import pytest

from moe_jax.core.template_process import _environment, _rendered


def rendered(text: str, *, of_task: bool, **values: object) -> str:
    return _environment(of_task).from_string(text).render(**values)


@pytest.mark.parametrize(
    ("text", "of_chat", "of_task"),
    [
        ("a {{ missing }} b", "a  b", None),  # in a prompt it would be a mistake of whoever wrote the task
        ("a\n", "a", "a\n"),
        ("  {% if true %}\nb{% endif %}", "b", "  \nb"),
        ("{{ 'a1b22' | regex_replace('[0-9]+', '-') }}", None, "a-b-"),
        ("{{ 'a1b22' | regex_replace('[0-9]+', '-', 1) }}", None, "a-b22"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01", "01"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", *['{"b": "<é>", "a": [1]}'] * 2),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",)
        + ('{"a":1,"b":"\\u00e9"}',) * 2,
        ("{{ {'a': 1} | tojson(indent=1) }}", *['{\n "a": 1\n}'] * 2),
        ("{{ raise_exception('refused') }}", None, None),
        ("{{ [].append(1) }}", None, None),
    ],
)
def test_what_they_write(text, of_chat, of_task):
    for given, expected in ((False, of_chat), (True, of_task)):
        if expected is None:
            with pytest.raises(jinja2.TemplateError):
                rendered(text, of_task=given)
        else:
            assert rendered(text, of_task=given) == expected


def test_the_year():
    assert rendered("{{ strftime_now('%Y') }}", of_task=False) in {
        str((datetime.datetime.now() - datetime.timedelta(days=days)).year) for days in (0, 1)
    }


def test_where_what_is_generated_stands():
    template = _environment(False).from_string(
        "a{% generation %}b{{ x }}{% endgeneration %}{% generation %}{% endgeneration %}c"
        "{% generation %}{{ x }}{% endgeneration %}"
    )
    for x, spans in (("é", [(1, 3), (4, 5)]), ("", [(1, 2)])):  # nothing is left of the rendering before
        found = _rendered(template, {"x": x}, max_chars=6)
        assert found == {"text": f"ab{x}c{x}", "generations": spans}
    with pytest.raises(jinja2.TemplateError, match="more than 6"):
        _rendered(template, {"x": "xxx"}, max_chars=6)
    # One of two is enough.
    kept = _environment(False).from_string(
        "{% generation %}c{% endgeneration %}{% set y %}{% generation %}a{% endgeneration %}{% endset %}b{{ y }}"
    )
    with pytest.raises(jinja2.TemplateError, match="stands inside"):
        _rendered(kept, {}, max_chars=6)
