"""A chat template is rendered locally only where that gives the backend's own text."""

from collections.abc import Callable
from functools import cache

import orjson
import pytest
from transformers import PreTrainedTokenizerFast

from router.base.errors import BackendRefusedError
from router.base.types import BackendId
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from router.prompts.chat_template import LocalTemplate, prove
from tests.conftest import StartServer
from tests.support.models.tiny_models import tiny_model
from tests.support.paths import TEMPLATES

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


# llama.cpp strips " \t\n\v\f\r" alone, Python all of these too.
_SPACES = [n for n in range(0x3001) if chr(n).isspace() and chr(n) not in " \t\n\v\f\r"]
_LETTERS = {space: 0xE000 + at for at, space in enumerate(_SPACES)}


def chat(*turns: str, **fields: object) -> dict[str, object]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": messages, **fields}


async def backend_of(template: str, *, bos: str = "", odd: str = "") -> LocalTemplate | None:
    """Prove `template` on a backend that strips BOS and adds `odd` to every text."""
    twin = _renderer(template, bos)

    async def apply(raw: bytes) -> str:
        text = twin(orjson.loads(raw)["messages"])
        return text.removeprefix(bos) + odd

    return await prove(template, bos, "</s>", apply)


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    source = tiny_model("llama").tokenizer_dir / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(source))


@pytest.fixture(autouse=True)
def _loaded() -> None:
    """Load the tokenizer before the event loop runs, where reading a file is not allowed."""
    _tokenizer()


def _renderer(template: str, bos: str) -> Callable[[list[dict[str, str]]], str]:
    """Return Hugging Face's own renderer, for which only ASCII white space is white space."""
    tokenizer = _tokenizer()
    tokenizer.bos_token = bos or None

    def render(messages: list[dict[str, str]]) -> str:
        told = [m | {"content": m["content"].translate(_LETTERS)} for m in messages]
        try:
            text = tokenizer.apply_chat_template(
                told, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:
            raise BackendRefusedError(str(error), backend_status=500) from error
        return str(text).translate({letter: space for space, letter in _LETTERS.items()})

    return render


async def test_a_proved_template_renders_plain_chats() -> None:
    template = await backend_of(CHATML)
    assert template is not None
    assert template.render(chat("hello", temperature=0.5, stream=True)) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_the_generation_prompt_can_be_left_off() -> None:
    template = await backend_of(CHATML)
    assert template is not None
    assert template.render(chat("hello"), generation_prompt=False) == (
        "<|im_start|>user\nhello<|im_end|>\n"
    )


async def test_bos_is_stripped_where_the_backend_strips_it() -> None:
    template = await backend_of(STRICT, bos="<s>")
    assert template is not None
    assert template.render(chat("a", "b", "c")) == "[user]a[assistant]b[user]c"


async def test_what_the_template_refuses_is_left_to_the_backend() -> None:
    template = await backend_of(STRICT, bos="<s>")
    assert template is not None
    assert template.render({"messages": [{"role": "system", "content": "x"}]}) is None


@pytest.mark.parametrize(
    "body",
    [
        chat("a", tools=[]),
        chat("a", chat_template_kwargs={"enable_thinking": False}),
        chat("a", reasoning_effort="low"),
        chat("a", response_format={"type": "json_object"}),
        chat("a", "the answer is"),
        chat(),
        {"messages": "a"},
        {"messages": ["a"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a", "name": "Ada"}]},
        chat("a" * 600_000),
    ],
)
async def test_other_bodies_are_left_to_the_backend(body: dict[str, object]) -> None:
    template = await backend_of(CHATML)
    assert template is not None
    assert template.render(body) is None


@pytest.mark.parametrize(
    ("template", "odd"),
    [(CHATML, " "), (CHATML + "{{ strftime_now('%d') }}", ""), ("{% if %}", ""), ("", "")],
)
async def test_a_template_that_does_not_agree_is_not_used(template: str, odd: str) -> None:
    async def apply(raw: bytes) -> str:
        return _renderer(CHATML, "")(orjson.loads(raw)["messages"]) + odd

    assert await prove(template, "", "", apply) is None


@pytest.mark.parametrize("name", [None, "Qwen-Qwen3-0.6B.jinja"])
async def test_agrees_with_a_real_server(llama_server: StartServer, name: str | None) -> None:
    extra = ["--jinja", "--chat-template-file", str(TEMPLATES / name)] if name else []
    server = await llama_server("llama", slots=1, extra_args=extra)
    async with Connections() as connections:
        client = LlamaClient(BackendId("a"), server.url, connections, Timeouts())
        props = await client.props()
        template = await prove(
            props.chat_template, props.bos_token, props.eos_token, client.apply_template
        )
        assert template is not None
        for turns in (["hi"], ["a", "<think>x</think>b", "c"], ["a", "b", "c", "d", "e"]):
            body = chat(*turns)
            assert template.render(body) == await client.apply_template(orjson.dumps(body))


async def test_a_chat_of_very_many_messages_is_the_backends_to_render() -> None:
    """Each message takes 10 µs, in which no other request is served."""
    template = await backend_of("{% for m in messages %}{{ m.content }};{% endfor %}")
    assert template is not None
    assert template.render(chat(*["x"] * 499)) == "x;" * 499
    assert template.render(chat(*["x"] * 501)) is None
