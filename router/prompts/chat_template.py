"""Render plain chats locally instead of by `POST /apply-template`, once proved to be equal.

The backend is the authority: a template is used only after it gave the backend's own text for a
set of conversations. A local template renders only bodies that hold nothing else a template could
see, and is dropped once the backend counts other tokens. Knows nothing of HTTP: rendering by the
backend is an argument.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import orjson
import structlog

from router.base.errors import BackendRefusedError
from router.prompts.template_environment import Environment

log = structlog.get_logger(__name__)

Apply = Callable[[bytes], Awaitable[str]]
Render = Callable[[list[dict[str, str]], bool], str]

# Fields of a chat body that a template can see (oaicompat_chat_params_parse, server-common.cpp).
SEEN_BY_TEMPLATES = frozenset(
    {
        "tools",
        "tool_choice",
        "json_schema",
        "response_format",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "reasoning_format",
        "reasoning_effort",
    }
)
_ROLES = ("system", "user", "assistant")
_PLAIN = frozenset({"role", "content"})
_LONG = 512 * 1024  # characters; rendering this much blocks the event loop for over 5 ms
_MANY_ODD = 32  # contents that are rendered otherwise: more, and the template is not used
_MANY = 500  # messages; each adds 7 to 14 µs, however short it is

_ODD = " two  spaces, a\ttab\n\n  and lines \n"
# White space for Python, letters for llama.cpp, which knows the ASCII ones alone.
_WIDE = "\u3000\u00a0\u2003 Ünï \x1c\x1f\u0085\u2028"
_PROBES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Hello"),),
    (("system", "Be brief."), ("user", "Hello")),
    (("user", "Hello"), ("assistant", "Hi!"), ("user", "How are you?")),
    (("system", _ODD), ("user", _ODD), ("assistant", _ODD), ("user", _ODD)),
    (("system", _WIDE), ("user", _WIDE), ("assistant", _WIDE), ("user", _WIDE)),
    (("user", ""), ("assistant", ""), ("user", "still here?")),
    (("user", "a"), ("user", "b")),
    (("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d")),
    (("system", "s"), ("user", "a"), ("system", "t"), ("user", "b")),
    (
        ("system", 'Täglich "grüßt" <b>das</b> & \\n {{ 1 }} {% if %} 日本語 🚢'),
        ("user", "<think>\nno\n</think>\n\nwhat?"),
        ("assistant", "<think>\nwell\n</think>\n\nThat."),
        ("user", "[INST] <|im_start|> </s> <end_of_turn>"),
    ),
    (*((role, f"turn {i}") for i in range(6) for role in ("user", "assistant")), ("user", "end")),
)


class LocalTemplate:
    """A chat template proved equal to the backend's. Build it with `prove`."""

    def __init__(self, render: Render, bos: str) -> None:
        self._render = render
        self._bos = bos  # removed from the start, as the server does where the vocabulary adds it
        self._odd: set[int] = set()  # hashes of contents that the backend renders

    def leave(self, contents: Iterable[str]) -> bool:
        """Leave chats with such a content to the backend. False: there are too many of them."""
        self._odd.update(map(hash, contents))
        return len(self._odd) <= _MANY_ODD

    def render(self, body: dict[str, Any], *, generation_prompt: bool = True) -> str | None:
        """Return the text of a plain chat; None for any other body.

        Without the generation prompt the text is not proved: good for a guess, not for a prompt.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not SEEN_BY_TEMPLATES.isdisjoint(body):
            return None
        if len(messages) > _MANY:
            return None
        size = 0
        for message in messages:
            if not isinstance(message, dict) or message.keys() != _PLAIN:
                return None
            content = message["content"]
            if message["role"] not in _ROLES or not isinstance(content, str):
                return None
            size += len(content)
            if self._odd and hash(content) in self._odd:
                return None
        if not messages or messages[-1]["role"] != "user" or size > _LONG:
            return None
        try:
            return self._render(messages, generation_prompt).removeprefix(self._bos)
        except Exception:  # noqa: BLE001 - the template's own exception: the backend reports it
            return None


async def prove(chat_template: str, bos: str, eos: str, apply: Apply) -> LocalTemplate | None:
    """Return the template if it renders as the backend does; else None.

    Logs why a template does not compile or differs. Where the backend refuses a conversation,
    local rendering has to fail too. Raises only exceptions of `apply`, except BackendRefusedError.
    """
    if "strftime_now" in chat_template or not chat_template:
        return None  # it depends on the date, or there is no template
    try:
        render = _compiled(chat_template, bos, eos)
    except Exception as error:  # noqa: BLE001 - jinja2 may raise anything for an unknown template
        log.info("template_not_used", reason=f"the template does not compile: {error}")
        return None
    for prefix in ("", bos):
        template = LocalTemplate(render, prefix)
        for probe in _PROBES:
            body = {"messages": [{"role": role, "content": text} for role, text in probe]}
            try:
                expected: str | None = await apply(orjson.dumps(body))
            except BackendRefusedError:
                expected = None
            if template.render(body) != expected:
                break
        else:
            return template
        if not bos:
            break
    log.info("template_not_used", reason="local rendering differs from the backend's")
    return None


def _compiled(chat_template: str, bos: str, eos: str) -> Render:
    """Compile a chat template. Raises whatever jinja2 raises for an unknown template."""
    environment = Environment()
    compiled = environment.compiled(chat_template)

    def render(messages: list[dict[str, str]], generation_prompt: bool) -> str:
        environment.begin()
        return str(
            compiled.render(
                messages=messages,
                add_generation_prompt=generation_prompt,
                bos_token=bos,
                eos_token=eos,
                enable_thinking=True,
            )
        )

    return render
