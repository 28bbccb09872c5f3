"""Chat templates that would take all time or memory: values that double, loops in loops, one huge operation."""

import os
import random
import resource
from pathlib import Path
from typing import Any

from moe_jax.core import template_sandbox
from moe_jax.core.template_process import MAX_MEMORY
from moe_jax.data.chat_template import ChatTemplate
from tests.attack.attacks import Attack

FILE = "chat_template.jinja"
_SAID = [{"role": role, "content": f"This is said {i}."} for i in range(5) for role in ("user", "assistant")]

# What x begins as, what becomes of it again and again, and what is made of it at last. N is a number.
_BEGINNINGS = (
    "'a'",
    "'aé字' * 99",
    "[0]",
    "[messages, messages]",
    "{'a': [1]}",
    "(1, 2)",
    "range(99999)",
    "messages",
    "N",
    "'9' * 4000",
)
_STEPS = (
    "x ~ x",
    "[x, x]",
    "(x, x)",
    "{'a': x, 'b': x}",
    "[x, x] | string",
    "[x, x] | tojson",
    "[x, x] | pprint",
    "x | string | replace('a', 'aaaa')",
    "[x, x] | join",
    "(x | string).join(['a', 'b', 'c'])",
    "x | string | indent(N)",
    "(x | string) * N",
    "x | list + x | list",
    "x | string | upper | escape",
    "[x] * N",
    "(x | string).translate({97: 'a' * N})",
    "(x | string).encode()",
    "x | map('string') | list",
    "x | string | urlencode",
    "x | string | center(N)",
    "dict(a=x, b=x)",
    "'%s%s' % (x, x)",
    "'{0}{0}{0}'.format(x)",
    "x | string | wordwrap(1)",
    "x | batch(1, x) | list",
    "x | slice(N) | list",
    "(x | string).expandtabs(N)",
    "(x | string).splitlines() | map('center', N) | list",
    "x | groupby('role') | list",
)
_ENDS = (
    "{{ x }}",
    "{{ x | string | length }}",
    "{{ x | tojson }}",
    "{{ x | pprint }}",
    "{{ x | string | tojson | pprint }}",
    "{{ x == x | list }}",
    "{{ [x, [x]] == [x, [x]] }}",
    "{{ (x, 1) < (x, 2) }}",
    "{{ x | map('list') | sum(start=[]) }}",
    "{% for y in x if y in x %}{{ y }}{% endfor %}",
    "{% for y in x recursive %}{{ y }}{{ loop(x) }}{% endfor %}",
    "{{ x | sort | unique | list }}",
    "{{ x | string | wordcount }}",
    "{{ x | string | int(base=36) }}",
    "{{ x | tojson(indent=N) }}",
    "{% for y in x | string %}{% for z in x | string %}{% endfor %}{% endfor %}",
    "{{ x | string | list | random }}",
)
_ALONE = (
    "{{ 1.5 | round(N) }}",
    "{{ ('9' * N) | int(base=N) }}",
    "{{ 7 ** 7 ** 7 ** N }}",
    "{{ '%Nd' % 1 }}",
    "{{ '%.Nf' % 1 }}",
    "{{ '{:N}'.format(1) }}",
    "{{ '{0:{1}}'.format(1, N) }}",
    "{{ 'a' | center(N) }}",
    "{{ 'a'.zfill(N) }}",
    "{{ 'a'.ljust(N) }}",
    "{{ 2 ** N % 7 }}",
    "{{ (2 ** N) | string }}",
    "{{ (1).to_bytes(N, 'big') }}",
    "{{ lipsum(n=N) }}",
    "{{ lipsum(min=N, max=N + 9) }}",
    "{{ 'a' * N ~ 'b' }}",
    "{{ [0] * N + [1] }}",
    "{{ (0,) * N == (0,) * N }}",
    "{{ range(N) | sum }}",
    "{{ range(99999) | map('center', N) | list }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'x' * N }}{% endfor %}",
    "{{ 1 << N }}",
    "{{ 'a' | indent(N) }}",
    "{{ 'a\\n' * 9999 | indent(9999) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(N) }}",
    "{% macro m(n) %}{{ k(n) }}{{ k(n) }}{% endmacro %}"
    "{% macro k(n) %}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(N) }}",
    "{% set c = cycler(*range(N)) %}{% for a in range(99999) %}{{ c.next() }}{% endfor %}",
    "{{ strftime_now('%c' * N) }}",
    "{% call(a) raise_exception('a' * N) %}{% endcall %}",
    "{{ messages | map(attribute='content') | join('a' * N) }}",
    "{% filter indent(N) %}{% filter upper %}{{ messages }}{% endfilter %}{% endfilter %}",
    "{{ x.a.b }}" * 9999,
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{{ " + "1 + " * 9999 + "1 }}",
    "{% if 1 %}" * 99 + "{% endif %}" * 99,
    "{{ [" + "[" * 90 + "'a' * N" + "]" * 90 + "] | string }}",
    "{{ [" + "1, " * 80_000 + "] }}",
    "{{ {" + "'a': 1, " * 30_000 + "} }}",
    "{{ 'a'" + " ~ 'a'" * 40_000 + " }}",
    "{{ 'a'" + " | upper" * 9999 + " }}",
    "{{ a" + ".b" * 99_999 + " }}",
    "{{ 1" + " == 1" * 50_000 + " }}",
    "{{ " + "not " * 60_000 + "1 }}",
    "{% if 1 %}" + "{% elif 1 %}a" * 9999 + "{% endif %}",
    "{% macro m() %}{% endmacro %}" * 8000,
    "{% set " + ", ".join(f"a{i}" for i in range(30_000)) + " = range(30000) %}",
    "{{ '" + "\\" * 200_000,
    "{%" * 99_999,
    " " * 250_000 + "{%- if 1 %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x={}) %}{% for i in range(99999) %}{% set ns.x = {'a': ns.x} %}{% endfor %}"
    "{{ ns.x == ns.x.a }}",
    "{% set a %}{{ range(99999) | join }}{% endset %}{% for i in range(N) %}{{ a }}{% endfor %}",
    "{% for i in range(99999) %}{% generation %}a{% endgeneration %}{% endfor %}",
    "{% macro m() %}{% generation %}a{% endgeneration %}{% endmacro %}" + "{{ m() }}" * 9999,
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{{ ('http://a.b ' * N) | urlize(N) }}",
    "{{ messages | tojson(indent='a' * N) }}",
    "{{ messages | tojson(separators=['a' * N, 'b']) }}",
    "{{ ('a' * N).split('a') | map('center', 99) | list }}",
    "{{ (3 ** 9999999) // (2 ** N) }}",
    "{{ '\\ud800' * N }}",
    "{{ '\\U0001F600' * N }}",
    "{{ strftime_now('%999999d' * N) }}",
    "{{ raise_exception(messages * N) }}",
    "{{ 0x" + "f" * 200_000 + " }}",
    "{% include 'a' %}{% import 'a' as b %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages.append(messages) }}",
)
_NUMBERS = ("9", "33", "64", "999", "99999", "9999999", "10 ** 9", "10 ** 10", "2 ** 63")
_PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def _make(rng: random.Random, original: None, folder: Path) -> None:
    kind = rng.random()
    if kind < 0.05:
        text = _PLAIN
    elif kind < 0.35:
        text = "".join(rng.sample(_ALONE, rng.randint(1, 2)))
    else:
        text = _growing(rng)
    if rng.random() < 0.2:
        text = f"{{% set t %}}{text}{{% endset %}}{{{{ t | string | length }}}}{{{{ t ~ t }}}}"
    while "N" in text:
        text = text.replace("N", rng.choice(_NUMBERS) if "%N" not in text and ":N" not in text else "999999999", 1)
    (folder / FILE).write_text(text)


def _growing(rng: random.Random) -> str:
    steps, times = rng.sample(_STEPS, rng.randint(1, 3)), rng.choice((8, 30, 60, 9999))
    begin, end = rng.choice(_BEGINNINGS), rng.choice(_ENDS)
    if rng.random() < 0.3:  # without a loop: what is constant is computed when the template is compiled
        x = f"({begin})"
        for step in steps * 4:
            if len(x) < 20_000:
                x = "(" + step.replace("x", x, 1).replace(" x", f" {begin}") + ")"
        return end.replace("x", x, 1).replace(" x", f" {begin}")
    body = "".join(f"{{% set ns.x = {step.replace('x', 'ns.x')} %}}".replace("mans.xp", "map") for step in steps)
    body = body.replace("ns.ns.x", "ns.x").replace("ens.xpandtabs", "expandtabs")
    loop = f"{{% set ns = namespace(x={begin}) %}}{{% for i in range({times}) %}}{body}{{% endfor %}}"
    return f"{loop}{{% set x = ns.x %}}{end}"


def _render(folder: Path, out: Path) -> str:
    return ChatTemplate((folder / FILE).read_text())(_SAID)


def of_templates() -> tuple[float, int]:
    """Returns the processor time of all processes of templates so far, and the most bytes of the one there is.

    One that was ended is said to have had all that it may have, or more if it had.
    """
    ended, process = resource.getrusage(resource.RUSAGE_CHILDREN), template_sandbox._running()
    folder = Path(f"/proc/{process.pid}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    living = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    status = (folder / "status").read_text()
    most = int(status.split("VmHWM:")[1].split()[0]) * 1024 if "VmHWM:" in status else 0
    before = ended.ru_utime + ended.ru_stime
    if before > _ENDED[0]:
        # What a process has had includes what the one that started it had.
        most = max(ended.ru_maxrss * 1024, MAX_MEMORY)
    _ENDED[0] = before
    return before + living, most


_ENDED = [0.0]  # processor time of those that had been ended when it was last asked for


def _wrong(original: None, folder: Path, read: Any) -> str | None:
    if (folder / FILE).read_text() == _PLAIN and read != "".join(f"{one['role']}: {one['content']}\n" for one in _SAID):
        return "an ordinary template writes something else"
    return None


ATTACKS = (
    Attack(
        name="chat templates",
        original=lambda: None,
        make=_make,
        read=_render,
        wrong=_wrong,
        quick=5,
        share=200,
        max_seconds=1.0,
        max_bytes=300_000_000,
        besides=of_templates,
    ),
)
