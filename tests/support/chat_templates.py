"""Chat templates in the styles of five public families, in our own words; G and H stand around what is generated."""

CHATML = """\
{%- if messages[0].role != 'system' -%}
    {{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{ '<|im_start|>assistant\\n' }}G{{ message.content + '<|im_end|>' }}H{{ '\\n' }}
    {%- else -%}
        {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token -}}
{%- set ns = namespace(tail=messages) -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set opening = messages[0]['content'] | trim -%}
    {%- set ns.tail = messages[1:] -%}
{%- else -%}{%- set opening = '' -%}{%- endif -%}
{%- if opening or date_string is defined -%}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' ~ opening ~ '<|eot_id|>' -}}
{%- endif -%}
{%- for m in ns.tail -%}
    {{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' -}}
    {%- if m.role == 'assistant' -%}
        G{{- m.content | trim ~ '<|eot_id|>' -}}H
    {%- else -%}{{- m.content | trim ~ '<|eot_id|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

MISTRAL = """\
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set turns = messages -%}{%- endif -%}
{{- bos_token -}}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must take turns: user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {%- if turn['role'] == 'user' -%}
        {%- if loop.first and system is defined -%}
            {{- '[INST] ' + system + '\\n\\n' + turn['content'] + ' [/INST]' -}}
        {%- else -%}{{- '[INST] ' + turn['content'] + ' [/INST]' -}}{%- endif -%}
    {%- else -%}
        G{{- ' ' + turn['content'] + eos_token -}}H
    {%- endif -%}
{%- endfor -%}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('There is no system role') }}{% endif %}
{% for message in messages %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' }}
    {%- if role == 'model' %}G{{ message['content'] | trim + '<end_of_turn>' }}H
    {%- else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}
{{ '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}G{{ message['content'] + eos_token }}H{{ '\\n' }}
{% else %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

# Reasoning of turns in the past is left out, and of the last turn there is some, even if it is empty.
REASONING = """\
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
        {%- if loop.last -%}
            {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content -%}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought|default('', true) + '\\n</think>\\n\\n' + answer -}}
        {%- else -%}{{- '<|im_start|>assistant\\n' + answer -}}{%- endif -%}
        {{- '<|im_end|>\\n' -}}
    {%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

STYLES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "zephyr": ZEPHYR}
"""The five of which each turn is written as it was generated."""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def marked(style: str) -> str:
    """The template with `{% generation %}` around what is generated."""
    return STYLES[style].replace("G{{", "{% generation %}{{").replace("}}H", "}}{% endgeneration %}")


def plain(style: str) -> str:
    """The same without the mark, as most templates are."""
    return STYLES[style].replace("G{{", "{{").replace("}}H", "}}")


SYSTEM = {"role": "system", "content": "You know sums."}
TURNS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": " And\ntwice that? "},
    {"role": "assistant", "content": "8, and here is a\nsecond line."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "4"},
]
