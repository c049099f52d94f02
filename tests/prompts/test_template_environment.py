"""llama.cpp's rules for strings, and limits of work, in local chat templates."""

import pytest
from jinja2 import TemplateError

from router.prompts.template_environment import Environment, OtherwiseError, TooMuchWorkError


def rendered(source: str, text: str = "") -> str:
    environment = Environment()
    template = environment.compiled(source)
    environment.begin()
    return str(template.render(text=text, messages=[{"role": "user", "content": text}] * 10))


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("{{ text | trim }}", " \t\u3000x\u00a0\x1f \v", "\u3000x\u00a0\x1f"),
        ("{{ text.strip() }}", " \u2003x\n", "\u2003x"),
        ("{{ text.lstrip() }}|", " \u2003x ", "\u2003x |"),
        ("{{ text.rstrip() }}|", "x\u0085 ", "x\u0085|"),
        ("{{ text.strip('\n') }}", "\n \n", " "),
        ("{{ text | length }}", "ßa", "3"),
        ("{{ text | upper }}{{ text.lower() }}", "ßÄb", "ßÄBßÄb"),
        ("{{ text | title }}", "it's ün b\u3000c", "It's ün B\u3000c"),
        ("{{ text | capitalize }}", "äB cD", "äb cd"),
        ("{{ text.split() | join('-') }}", " a  b\tc", "-a--b\tc"),
        ("{{ text.split('</t>')[-1] }}", "a</t>b", "b"),
        ("{{ text.rsplit('.', 1)[0] }}", "a.b.c", "a.b"),
        ("{{ text.replace('a', 'bb') }}{{ text | replace('a', '') }}", "aä", "bbää"),
        ("{{ text[1:] }}{{ text[0] }}", "abc", "bca"),
        ("{% generation %}{{ text }}{% endgeneration %}", "x", "x"),
        ("{{ text.nothing is defined }}", "x", None),
        ("{% for m in messages %}{{ loop.index }}{% endfor %}", "", "12345678910"),
        ("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ n.b }}", "", "2"),
        ("{{ 'a' ~ 1 ~ text }}", "ü", "a1ü"),
    ],
)
def test_rules_of_strings(source: str, text: str, expected: str | None) -> None:
    if expected is None:  # how a boolean prints is not known
        with pytest.raises(OtherwiseError):
            rendered(source, text)
    else:
        assert rendered(source, text) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ text[:2] }}",
        "{{ text[0] }}",
        "{{ text.strip('ü') }}",
        "{{ text | first }}",
        "{{ text | list }}",
        "{{ messages }}",
        "{{ messages[0] | tojson }}",
        "{{ text | wordwrap(2) }}",
        "{% for c in text %}{{ c }}{% endfor %}",
        "{{ '%s' % text }}",
        "{{ text.replace('', 'x') }}",
        "{{ text | join(' ') }}",
    ],
)
def test_what_llama_cpp_may_do_otherwise_is_not_guessed(source: str) -> None:
    with pytest.raises(TemplateError):
        rendered(source, "üab")


def grown(step: str, start: str = "'aaaa'") -> str:
    """Return a template that does `step` with `n.a` sixty times."""
    head = "{% set n = namespace(a=" + start + ") %}{% for _ in range(60) %}{% set n.a = "
    return head + step + " %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}",
        "{% for a in messages %}" * 6 + "{% endfor %}" * 6,
        grown("n.a + n.a"),
        grown("n.a ~ n.a"),
        grown("n.a.replace('a', 'aa')"),
        grown("n.a + n.a", start="[1]"),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 300000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set a = 'a' * 300000000 %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% for _ in range(99) %}{{ text }}{% endfor %}",
        "x" * 300_000,
    ],
)
def test_work_and_memory_of_a_template_are_limited(source: str) -> None:
    with pytest.raises((TooMuchWorkError, OtherwiseError)):
        rendered(source, "x" * (1 << 20))
