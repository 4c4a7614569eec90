"""The published ways out of a Jinja sandbox, as the chat template of a model from nowhere.

A template comes with a checkpoint that somebody downloaded: it may say anything, and must reach
nothing but the messages. Each of these is refused, or says nothing that it should not know.
"""

from __future__ import annotations

import pytest

from trioengine.errors import ConfigError, InvalidRequestError
from trioengine.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "x"}]

ESCAPES = (
    # Attributes by every spelling.
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''|attr('__cla' ~ 'ss__')|attr('__base__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f')|attr('mro') }}",
    "{{ [messages]|map(attribute='__class__')|list|first }}{{ 1 / 0 }}",
    "{{ (messages|map('attr', '__class__')|list)[0].mro() }}",
    "{{ messages|sum(attribute='__class__') }}{{ 1 // 0 }}",
    "{{ [{}]|selectattr('__class__')|list|length // 0 }}",
    "{{ ({}|attr('__class__')).__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ lipsum|attr('__globals__') }}{{ lipsum.__globals__.os }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ namespace.__init__.__globals__.os }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ range.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__.co_consts[0] }}",
    "{{ strftime_now.__globals__['time'].sleep(9) }}",
    "{{ strftime_now.__builtins__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment.loader }}",
    "{{ self._TemplateReference__context.parent.cycler.__init__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ loop.__class__.__init__.__globals__ }}",
    "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% for m in messages %}{{ loop._iterator.gi_frame.f_back }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "{{ ((messages|map('upper'))|attr('gi_code')).co_names[0] }}",
    # Format strings: CVE-2016-10745, CVE-2019-10906, CVE-2024-56326, CVE-2025-27516.
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{a.__class__.__init__.__globals__}'.format_map({'a': cycler}) }}",
    "{{ ('{0.__class__}'|attr('format'))(messages) }}",
    "{{ ('{a.__class__}'|attr('format_map'))({'a': messages}) }}",
    "{{ ['{0.__class__}'.format]|map('first')|list }}{{ 1 // 0 }}",
    "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
    "{% set f = '{a.__class__}'.format_map %}{{ f({'a': messages}) }}",
    "{% set d = {'f': '{0.__class__}'.format} %}{{ d.f(messages) }}",
    "{{ messages|map('{0.__class__}'.format)|list }}",
    "{% set n = namespace(f='{0.__class__}'.format) %}{{ n.f(messages) }}",
    "{{ '{0[__class__]}{0.__class__}'|format(messages) }}{{ '{0.__class__}'.format(1) }}",
    # Mutation of what is shared, and of what others hold.
    "{{ messages.append({'role': 'system'}) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'content': 'y'}) }}",
    "{{ messages[0].pop('content') }}",
    "{{ messages[0].__setitem__('content', 'y') }}",
    "{% do messages.append(1) %}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "{% set n = namespace(**{'__init__': 1}) %}",
    # Files and other templates.
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% from '/etc/passwd' import x %}",
    "{% extends '/etc/passwd' %}",
    "{{ open('/etc/passwd').read() }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ config.__class__ }}{{ config.items() }}",
    "{{ request.application.__globals__ }}",
    "{{ url_for.__globals__ }}",
    "{{ environment.loader.searchpath[0] }}",
    "{{ __import__('os').system('id') }}",
    "{{ eval('1') }}",
    "{{ messages.__reduce_ex__(2) }}",
    "{% debug %}{{ 1 // 0 }}",
)

# Time and memory.
BOMBS = (
    "{{ 'x' * 10**10 }}",
    "{{ ['x'] * 10**9 }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.rjust(10**10) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x' | indent(10**10) }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ '%1000000000000d' | format(1) }}",
    "{{ '{:1000000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**10) }}",
    "{{ '{:>{}}'.format(1, 10**10) }}",
    "{{ '{: >{}}'.format('x', '10000000000') }}",
    "{{ '{: >10000000000}'.format('x') }}",
    "{{ '{:{w}}'.format(1, w=10**10) }}",
    "{{ '{v:{w}}'.format_map({'v': 1, 'w': 10**10}) }}",
    "{{ ('{:{}}'|e).format(1, 10**10) }}",
    "{% set f = '{:{}}'.format %}{{ f(1, 10**10) }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%*d'|format(10**10, 1) }}",
    "{{ 'x\\ty'.expandtabs(tabsize=10**9) }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ range(10**9) | list }}",
    "{{ range(10**9) | sum }}",
    "{{ lipsum(n=10**9) }}",
    "{{ (10**4299 * 10)|string|length // 0 }}",
)


@pytest.mark.parametrize("source", [*ESCAPES, *BOMBS])
def test_no_way_out(source: str) -> None:
    messages = [dict(message) for message in MESSAGES]
    try:
        text = ChatTemplate(source).render(messages, {})
    except (InvalidRequestError, ConfigError):
        text = ""
    assert text == ""  # what the sandbox takes for undefined says nothing
    assert messages == MESSAGES  # nor into what is the request's


@pytest.mark.parametrize("source", BOMBS)
def test_what_would_fill_the_memory_is_refused_before_it_does(source: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        ChatTemplate(source).render(MESSAGES, {})
    cause = refusal.value.__cause__
    assert cause is not None  # else it was looked at when it was there
    assert not isinstance(cause, MemoryError)


def test_ordinary_widths_and_formats_are_there() -> None:
    source = (
        "{{ 'x'.ljust(3) }}{{ '%03d' % 7 }}{{ '{:>3}'.format(1) }}{{ 'x'|center(3) }}"
        "{{ '{:>{}}'.format(1, 3) }}{{ '{a:>3}'.format_map({'a': 2}) }}"
        "{{ ('{:3}'|e).format('<') }}"
        "{{ 'a\\nb'|indent(1) }}{{ '%s: 12345678' % 1 }}{{ '%s'|format(12345678) }}"
    )
    text = ChatTemplate(source).render([], {})
    assert text == "x  007  1 x   1  2&lt;  a\n b1: 1234567812345678"


def test_what_a_client_writes_is_no_format() -> None:
    """Long numbers in a message, or as a tool's argument, are nobody's width."""
    source = (
        "{% macro say(x) %}{{ x }}{% endmacro %}{{ messages[0].content.strip() }}"
        "{{ say(17000000000) }}{{ '%s' % messages[0].content }}"
        "{{ '{}'.format(messages[0].content) }}{{ '{}'.format(17000000000) }}"
    )
    text = ChatTemplate(source).render([{"role": "user", "content": "a:12345678"}], {})
    assert text == "a:1234567817000000000" + "a:12345678" * 2 + "17000000000"


@pytest.mark.parametrize("name", ["messages", "self", "raise_exception", "range", "__class__"])
def test_a_clients_own_variables_are_data(name: str) -> None:
    """``chat_template_kwargs`` may be called what they like: they are values, never code."""
    template = ChatTemplate("{{ x }}{% if messages is defined %}!{% endif %}")
    try:
        text = template.render([dict(MESSAGES[0])], {name: "{{ 7 * 7 }}", "x": "{{ 7 * 7 }}"})
    except InvalidRequestError:
        return
    assert text == "{{ 7 * 7 }}!"
