"""Read the prompt of a parsed request: the ids that the engine will see.

The backend renders the template (`/apply-template`) and is the authority on tokens; text that it
has tokenized before is not sent again. A prompt that the backend refuses is unknown, with a reason.
A backend that does not answer raises, so that another backend reads the prompt.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

import structlog
from msgspec.structs import replace

from router.base.decoding import json_bytes
from router.base.errors import BackendError, BackendRefusedError
from router.base.tokens import EMPTY, Tokens, count, join, pack
from router.base.types import NO_TENANT, BackendId, Prompt, Tenant
from router.llama.client import LlamaClient
from router.llama.wire import (
    ChatPrompt,
    InfillPrompt,
    MixedPrompt,
    ParsedRequest,
    TextPrompt,
    TokenPrompt,
    UnknownPrompt,
)
from router.prompts.boundaries import BoundaryFinder
from router.prompts.chat_template import LocalTemplate
from router.prompts.infill import InfillRule, corrected, infill_tokens
from router.prompts.tokenizer import SegmentTokenizer

log = structlog.get_logger(__name__)

_READERS = 256  # of tenants
_LATEST = 32  # messages of a chat that are compared one by one


@dataclass(slots=True)
class Vocabulary:
    """The tokenizer and template of one model, and a backend to ask."""

    client: LlamaClient
    tokenizer: SegmentTokenizer
    media_marker: str
    template: LocalTemplate | None = None  # None: the backend renders
    infill: InfillRule | None = None  # None: the model has no infill, or another rule
    others: set[BackendId] = field(default_factory=set)  # servers that render otherwise


class PromptReader:
    """Reads prompts with the tokenizer of one backend, and caches ids for one tenant."""

    def __init__(self, vocabulary: Vocabulary, tenant: Tenant = NO_TENANT) -> None:
        self._vocabulary = vocabulary
        self._tenant = tenant
        self._finder = BoundaryFinder(self._render, vocabulary.tokenizer, tenant)
        self._others: dict[Tenant, PromptReader] = {}

    def forget(self) -> None:
        """Forget all texts that were read, of all tenants: they are read again."""
        self._others.clear()
        self._finder.forget()
        self._vocabulary.tokenizer.forget()

    def of(self, tenant: Tenant) -> "PromptReader":
        """Return the reader for a tenant. Only the latest are kept: clients may make up salts."""
        if tenant == self._tenant:
            return self
        found = self._others.pop(tenant, None) or PromptReader(self._vocabulary, tenant)
        self._others[tenant] = found
        if len(self._others) > _READERS:
            del self._others[next(iter(self._others))]
        return found

    async def read(
        self, parsed: ParsedRequest, *, boundaries: bool = False, n_ctx: int | None = None
    ) -> Prompt:
        """Return the prompt of a request; unknown, with a reason, if the backend refuses it.

        Unknown too if it surely has more than `n_ctx` tokens: to count them would take seconds,
        for a request that the backend refuses. Raises BackendError if the backend does not answer,
        which says nothing of the request.
        `boundaries` asks for the boundaries too, in up to eight more renderings. Only chats without
        media have boundaries: the router does not claim what a slot holds of media chats.
        """
        source = parsed.prompt_source
        try:
            prompt = await self._read(parsed, n_ctx)
            if boundaries and isinstance(source, ChatPrompt) and source.has_boundaries:
                found = await self._finder.find(source.body, prompt.tokens, parsed.hints.forks)
                prompt = replace(prompt, boundaries=found)
            return prompt
        except BackendRefusedError as error:
            if error.backend_status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise  # the backend loads its model: no refusal of the prompt
            # Very likely the request is wrong; the backend's own answer will say so.
            return Prompt(
                unknown="the backend does not render or tokenize the prompt: "
                f"{without_prompt(error)}"
            )

    async def _read(self, parsed: ParsedRequest, n_ctx: int | None) -> Prompt:
        source = parsed.prompt_source
        match source:
            case TokenPrompt():
                return Prompt(source.tokens)
            case TextPrompt():
                return await self._whole(source.text, n_ctx)
            case MixedPrompt():
                ids = await self._vocabulary.client.tokenize(
                    list(source.parts), add_special=True, parse_special=True
                )
                return Prompt(pack(ids))
            case ChatPrompt():
                text = await (
                    self._by_backend(source.body) if source.media else self._render(source.body)
                )
                if source.media:
                    return await self._with_media(text, source.media)
                return await self._whole(text, n_ctx)
            case InfillPrompt():
                return await self._infill(source)
            case UnknownPrompt():
                return Prompt(unknown=source.reason)

    async def _infill(self, source: InfillPrompt) -> Prompt:
        rule = self._vocabulary.infill
        if rule is None:
            return Prompt(unknown="it is not known how the server builds an infill prompt")
        tokens = await infill_tokens(rule, source, self._plain, self._special)
        if count(tokens) >= rule.n_ctx:  # the server may cut more than is known, or refuse it
            return Prompt(unknown="the server may cut this infill prompt to its context")
        return Prompt(tokens)

    async def _plain(self, text: str) -> Tokens:
        return await self._vocabulary.tokenizer.tokenize_plain(text, self._tenant)

    async def _special(self, text: str) -> Tokens:
        return await self._tokenize(text, add_special=False) if text else EMPTY

    async def _whole(self, text: str, n_ctx: int | None) -> Prompt:
        if n_ctx is not None and await self._vocabulary.tokenizer.least_tokens(text) > n_ctx:
            return Prompt(unknown="it has more tokens than a slot can hold")
        return Prompt(await self._tokenize(text, add_special=True))

    async def _with_media(self, text: str, media: tuple[str, ...]) -> Prompt:
        """Return the prompt of rendered text; each media marker becomes its fingerprint."""
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
        return await self._vocabulary.client.apply_template(json_bytes(body))

    async def _tokenize(self, text: str, *, add_special: bool) -> Tokens:
        tokenizer = self._vocabulary.tokenizer
        return await tokenizer.tokenize(text, add_special=add_special, tenant=self._tenant)

    async def answer(self, text: str) -> Tokens:
        """Return the ids of an answer, tokenized by itself. Raises BackendError."""
        return await self._tokenize(text, add_special=False)

    async def compare(
        self,
        parsed: ParsedRequest,
        expected: int,
        reported: int,
        *,
        server: LlamaClient | None = None,
        lost: bool = False,
    ) -> bool:
        """Compare the expected with the reported prompt tokens; drop shortcuts that are wrong.

        `server`: where the prompt was computed. `lost`: less of it was reused than was to be.
        Return whether that server renders the prompt otherwise than it was read; `differs` says
        whether it always does.
        """
        vocabulary = self._vocabulary
        tokenizer, agreed = vocabulary.tokenizer, vocabulary.tokenizer.report(expected, reported)
        if agreed and not lost:
            return False
        source = parsed.prompt_source
        is_other = False
        try:
            if isinstance(source, InfillPrompt):
                await self._correct_infill(source, reported)
            elif isinstance(source, TextPrompt):
                await tokenizer.disagreed(source.text, add_special=True, tenant=self._tenant)
            elif isinstance(source, ChatPrompt) and not source.media:
                text = await self._by_backend(source.body)
                is_other = await self._renders_otherwise(server, source.body, text)
                local = vocabulary.template
                if local is not None and local.render(source.body) not in (None, text):
                    is_other = True
                    await self._correct_template(local, source.body)
                if not agreed and not is_other:
                    await tokenizer.disagreed(text, add_special=True, tenant=self._tenant)
        except BackendError as error:
            log.info("tokenizer_not_compared", reason=without_prompt(error))
        return is_other

    def differs(self, server: BackendId) -> bool:
        """Return whether a server of the model was seen to render a chat in its own way."""
        return server in self._vocabulary.others

    async def _renders_otherwise(
        self, server: LlamaClient | None, body: dict[str, Any], text: str
    ) -> bool:
        """Return whether another server of the model renders a chat otherwise; log it once.

        Raises BackendError.
        """
        own, others = self._vocabulary.client, self._vocabulary.others
        if server is None or server.id == own.id:
            return False
        if server.id not in others and await server.apply_template(json_bytes(body)) != text:
            others.add(server.id)
            log.warning(
                "servers_render_differently",
                backend=server.id,
                read_by=own.id,
                reason="their chat templates or time zones differ: start them alike, or give them"
                " different names",
            )
        return server.id in others

    async def _correct_template(self, local: LocalTemplate, body: dict[str, Any]) -> None:
        """Leave the contents to the backend that it renders otherwise, or drop the template."""
        contents = ["a", *(message["content"] for message in body["messages"][-_LATEST:])]
        odd: list[str] = []
        for content in contents:
            alone = {"messages": [{"role": "user", "content": content}]}
            if local.render(alone) not in (None, await self._by_backend(alone)):
                odd.append(content)
        if not odd or "a" in odd or not local.leave(odd):
            self._vocabulary.template = None
            log.warning("template_dropped", reason="the backend renders it differently")

    async def _correct_infill(self, source: InfillPrompt, reported: int) -> None:
        """Learn the server's `-b` from a prompt that was cut, or drop the rule."""
        rule = self._vocabulary.infill
        if rule is not None:
            found = await corrected(rule, source, reported, self._plain, self._special)
            self._vocabulary.infill = found
            if found is None:
                log.warning("infill_rule_dropped", reason="the backend counts other tokens")


def is_left_to_server(
    parsed: ParsedRequest, prompt: Prompt, reader: PromptReader | None, tenant: Tenant
) -> bool:
    """Return whether llama-server should pick the slot, because the prompt cannot be read here.

    llama-server knows the tokens and picks the slot that has most of them. False for a tenant's
    request: all slots of other tenants would have to be emptied for it. False also for a request
    that llama-server will refuse: it must not keep other requests waiting.
    """
    source = parsed.prompt_source
    unread = reader is None
    if isinstance(source, UnknownPrompt):
        unread = source.legal
    elif isinstance(source, InfillPrompt):
        unread = prompt.unknown is not None
    chosen = bool(tenant) or parsed.lora or parsed.slot_hint is not None
    return unread and parsed.cache_prompt and not chosen


def without_prompt(error: BackendError) -> str:
    """Return the message of an error without the backend's words, which may quote a prompt."""
    if isinstance(error, BackendRefusedError):
        return f"HTTP {error.backend_status}"
    return str(error)


def fingerprint_id(fingerprint: str) -> int:
    """Return a negative id for a picture or sound; no vocabulary has negative ids.

    The id is never -1, which means "media" in state files.
    """
    number = int.from_bytes(blake2b(fingerprint.encode(), digest_size=4).digest(), "little")
    return -2 - number % (2**31 - 2)
