"""From a parsed request to the ids that the engine will see.

The backend renders the template (`/apply-template`) and is the truth about tokens; what it has
tokenized before is not sent again. What it refuses is unknown, with a reason. What it does not
answer is another backend's to read: that raises.
"""

from dataclasses import dataclass, replace
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

import orjson
import structlog

from router.base.errors import BackendError, BackendRefusedError
from router.base.tokens import Tokens, count, head, join, pack, tail
from router.base.types import NOBODY, Nearest, Prompt, Tenant
from router.llama.client import LlamaClient
from router.llama.wire import (
    ChatPrompt,
    MixedPrompt,
    ParsedRequest,
    TextPrompt,
    TokenPrompt,
    UnknownPrompt,
)
from router.prompts.boundaries import BoundaryFinder
from router.prompts.chat_template import LocalTemplate
from router.prompts.divergence import Part, part_at
from router.prompts.tokenizer import SegmentTokenizer

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Vocabulary:
    """One model's way from text to ids, and a backend to ask."""

    client: LlamaClient
    tokenizer: SegmentTokenizer
    media_marker: str
    template: LocalTemplate | None = None  # None: the backend renders


class PromptReader:
    """Reads prompts with the vocabulary of one backend, and remembers them for one tenant."""

    def __init__(self, vocabulary: Vocabulary, tenant: Tenant = NOBODY) -> None:
        self._vocabulary = vocabulary
        self._tenant = tenant
        self._finder = BoundaryFinder(self._render, vocabulary.tokenizer, tenant)
        self._others: dict[Tenant, PromptReader] = {}

    def of(self, tenant: Tenant) -> "PromptReader":
        """The same for a tenant; there are as many as the configuration has."""
        if tenant == self._tenant:
            return self
        if tenant not in self._others:
            self._others[tenant] = PromptReader(self._vocabulary, tenant)
        return self._others[tenant]

    async def read(self, parsed: ParsedRequest, *, boundaries: bool = False) -> Prompt:
        """The prompt of a request; unknown with a reason if the backend refuses it. Raises
        BackendError if it does not answer, which says nothing of the request.

        With its boundaries on demand, which takes up to four more renderings. Only chats have
        any, and chats with media have none: what a slot holds of those is not claimed anyway.
        """
        source = parsed.prompt_source
        try:
            prompt = await self._read(parsed)
            if boundaries and isinstance(source, ChatPrompt) and not source.media:
                found = await self._finder.find(source.body, prompt.tokens)
                prompt = replace(prompt, boundaries=found)
            return prompt
        except BackendRefusedError as error:
            if error.backend_status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise  # it loads its model: that is no refusal of the prompt
            # Very likely the request itself is wrong; the backend's own answer will say so.
            return Prompt(
                unknown=f"the backend does not render or tokenize it: {without_prompt(error)}"
            )

    async def _read(self, parsed: ParsedRequest) -> Prompt:
        source = parsed.prompt_source
        match source:
            case TokenPrompt():
                return Prompt(source.tokens)
            case TextPrompt():
                return Prompt(await self._tokenize(source.text, add_special=True))
            case MixedPrompt():
                ids = await self._vocabulary.client.tokenize(
                    list(source.parts), add_special=True, parse_special=True
                )
                return Prompt(pack(ids))
            case ChatPrompt():
                text = await (
                    self._by_backend(source.body) if source.media else self._render(source.body)
                )
                return await self._chat(text, source.media)
            case UnknownPrompt():
                return Prompt(unknown=source.reason)

    async def _chat(self, text: str, media: tuple[str, ...]) -> Prompt:
        """Rendered text; each media marker in it becomes its fingerprint."""
        if not media:
            return Prompt(await self._tokenize(text, add_special=True))
        marker = self._vocabulary.media_marker
        parts = text.split(marker) if marker else [text]
        if len(parts) != len(media) + 1:
            return Prompt(unknown="the template does not show each media part once")
        tokens: list[Tokens] = []
        for index, part in enumerate(parts):
            if part:
                tokens.append(await self._tokenize(part, add_special=index == 0))
            if index < len(media):
                tokens.append(pack([fingerprint_id(media[index])]))
        return Prompt(join(tokens), n_media=len(media))

    async def _render(self, body: dict[str, Any], generation_prompt: bool = True) -> str:
        local = self._vocabulary.template
        text = local.render(body, generation_prompt=generation_prompt) if local else None
        if text is None:
            text = await self._by_backend(
                body if generation_prompt else {**body, "add_generation_prompt": False}
            )
        return text

    async def _by_backend(self, body: dict[str, Any]) -> str:
        return await self._vocabulary.client.apply_template(orjson.dumps(body))

    async def _tokenize(self, text: str, *, add_special: bool) -> Tokens:
        tokenizer = self._vocabulary.tokenizer
        return await tokenizer.tokenize(text, add_special=add_special, tenant=self._tenant)

    async def answer(self, text: str) -> Tokens:
        """The ids of an answer, which stands for itself. Raises BackendError."""
        return await self._tokenize(text, add_special=False)

    async def part(self, chat: dict[str, Any], nearest: Nearest) -> Part | None:
        """In which part of a chat without media it left `nearest`; None if it is not rendered as
        it was then. Raises BackendError."""

        async def tokens_of(body: dict[str, Any]) -> Tokens:
            return await self._tokenize(await self._render(body), add_special=True)

        known = join([nearest.before, nearest.ours])
        start = nearest.common - count(nearest.before)
        if head(tail(await tokens_of(chat), start), count(known)) != known:
            return None
        return await part_at(chat, nearest.common, tokens_of)

    async def compare(self, parsed: ParsedRequest, expected: int, reported: int) -> None:
        """Tell the tokenizer how many prompt tokens the engine saw; it may have to give up
        a shortcut."""
        tokenizer = self._vocabulary.tokenizer
        if tokenizer.report(expected, reported):
            return
        source = parsed.prompt_source
        try:
            if isinstance(source, TextPrompt):
                await tokenizer.disagreed(source.text, add_special=True, tenant=self._tenant)
            elif isinstance(source, ChatPrompt) and not source.media:
                text = await self._by_backend(source.body)
                local = self._vocabulary.template
                if local is not None and local.render(source.body) not in (None, text):
                    self._vocabulary.template = None
                    log.warning("template_dropped", reason="the backend renders this otherwise")
                await tokenizer.disagreed(text, add_special=True, tenant=self._tenant)
        except BackendError as error:
            log.info("tokenizer_not_compared", reason=without_prompt(error))


def is_left(parsed: ParsedRequest, reader: PromptReader | None, tenant: Tenant) -> bool:
    """The slot is best left to the server, which knows the tokens, and takes the one that has most
    of them. Not where all slots of other tenants would have to be emptied for that; and what it
    will refuse shall not keep others waiting."""
    source = parsed.prompt_source
    unread = source.legal if isinstance(source, UnknownPrompt) else reader is None
    chosen = bool(tenant) or parsed.lora or parsed.slot_hint is not None
    return unread and parsed.cache_prompt and not chosen


def without_prompt(error: BackendError) -> str:
    """For whoever may not see prompts. What the backend says itself may quote one."""
    if isinstance(error, BackendRefusedError):
        return f"HTTP {error.backend_status}"
    return str(error)


def fingerprint_id(fingerprint: str) -> int:
    """A negative id, which no vocabulary has: one for each picture or sound.

    -1 means "media" in state files, so it is not among them.
    """
    number = int.from_bytes(blake2b(fingerprint.encode(), digest_size=4).digest(), "little")
    return -2 - number % (2**31 - 2)
