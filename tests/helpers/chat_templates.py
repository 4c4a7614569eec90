"""Chat templates in the manner of those that models come with, and conversations for them."""

from __future__ import annotations

from typing import Any, Final

CHATML: Final = """{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

STRICT_TURNS: Final = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user/assistant/user') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\\n' if loop.first and system else '') }}
        {{- message.content | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""

TOOLS: Final = """{%- set ns = namespace(last_user=-1, n=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}
    {{- 'Today: ' + strftime_now('%Y') + '\\n# Tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}
    {{- tools | tojson(indent=2, sort_keys=True) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{%- continue %}{%- endif %}
    {%- if message.role == 'end' %}{%- break %}{%- endif %}
    {%- set ns.n = ns.n + 1 %}
    {{- message.role + '(' ~ ns.n ~ '): ' }}
    {%- if message.content is string %}{{- message.content }}
    {%- elif message.content %}{%- for part in message.content %}{{- part.text }}{%- endfor %}
    {%- endif %}
    {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {%- if message.tool_calls is defined %}{{- message.tool_calls | tojson }}{%- endif %}
    {{- '-' * 3 + '\\n' }}
{%- endfor %}
{%- set extra = dict(a=1, **{'b': ns.last_user}) %}
{{- extra.items() | list | length }}{{ documents is none }}{{ extra | tojson }}"""

GENERATION: Final = """{% for message in messages %}
  {% if message.role == 'assistant' %}
    {% generation %}
    {% set inner = 'x' %}
    A: {{ message.content }}{{ inner }}
    {% endgeneration %}
    {{ inner is defined }}
  {% else %}
Q: {{ message.content }}
  {% endif %}
{% endfor %}
{% if enable_thinking is defined and not enable_thinking %}no thinking{% endif %}"""

PARITY: Final = {
    "chatml": CHATML,
    "strict_turns": STRICT_TURNS,
    "tools": TOOLS,
    "generation": GENERATION,
}

PLAIN: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "Hi <there> & “you” 😀"},
    {"role": "assistant", "content": "  Hello.  "},
    {"role": "user", "content": "\n日本語?\n"},
]

RICH: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "skip", "content": "never seen"},
    {"role": "user", "content": [{"type": "text", "text": "part one "}, {"text": "part two"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I should call the tool",
        "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": {"q": 'é "quoted" <b>', "n": None}}}
        ],
    },
    {"role": "tool", "content": "42", "tool_calls": None},
    {"role": "end", "content": "never seen"},
]

A_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "ünïcode <tag>", "parameters": {"type": "object"}},
}
