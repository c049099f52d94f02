"""Render plain chats locally instead of by `POST /apply-template`, once proved to be equal.

The backend is the authority: a template is used only after it gave the backend's own text for a
set of conversations. A local template renders only bodies that hold nothing else a template could
see, and is dropped once the backend counts other tokens. Knows nothing of HTTP: rendering by the
backend is an argument.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import structlog
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.base.errors import BackendRefusedError

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
_MANY = 500  # messages; each adds 7 to 14 µs, however short it is

_ODD = " two  spaces, a\ttab\n\n  and lines \n"
_PROBES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Hello"),),
    (("system", "Be brief."), ("user", "Hello")),
    (("user", "Hello"), ("assistant", "Hi!"), ("user", "How are you?")),
    (("system", _ODD), ("user", _ODD), ("assistant", _ODD), ("user", _ODD)),
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
    """Compile a chat template as Hugging Face does; template authors test with that."""

    class Environment(ImmutableSandboxedEnvironment):
        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            # The result of the full check for `loop`, which templates use for each message. The
            # full check takes as long as the rest of the message.
            if type(obj) is LoopContext:
                return not attr.startswith("_")
            return super().is_safe_attribute(obj, attr, value)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    compiled = environment.from_string(chat_template)
    # Merge the chain of two maps once: jinja2 merges it for each rendering, doubling the time.
    compiled.globals = dict(compiled.globals)

    def render(messages: list[dict[str, str]], generation_prompt: bool) -> str:
        return compiled.render(
            messages=messages,
            add_generation_prompt=generation_prompt,
            bos_token=bos,
            eos_token=eos,
            enable_thinking=True,
        )

    return render
