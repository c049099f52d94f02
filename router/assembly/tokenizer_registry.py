"""A tokenizer for each namespace, and a prompt reader for each backend."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from router.base.errors import BackendError, BackendRefusedError
from router.base.tasks import Tasks, in_thread, within
from router.base.types import BackendId, Namespace
from router.config.schema import TokenizerConfig, TokenizerMode
from router.llama.client import LlamaClient
from router.llama.replies import InfillAnswer, Props
from router.prompts.chat_template import prove
from router.prompts.infill import InfillRule, learn_rule
from router.prompts.local_tokenizer import LocalTokenizer, LocalTokenizerError, load_local
from router.prompts.reader import PromptReader, Vocabulary
from router.prompts.special_tokens import discover_specials
from router.prompts.tokenizer import SegmentTokenizer

log = structlog.get_logger(__name__)

# Looks in a row without a request at work after which a vocabulary is loaded, and looks after which
# it is loaded all the same.
_LOOKS_S = 1.0
_QUIET, _QUIET_MOST = 5, 60
_LOADING_S = 60.0  # for a vocabulary: a file on a mount that hangs never comes


@dataclass(slots=True)
class _Speakers:
    """The backends of one namespace that are up. The answer of one holds for all."""

    clients: dict[BackendId, LlamaClient] = field(default_factory=dict)

    async def tokenize(
        self, content: str | list[str | int], *, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Tokenize with one backend, or with the next if one does not answer.

        A doubted backend comes last. Raises BackendError.
        """
        failed = BackendError("no backend to tokenize with")
        for client in sorted(self.clients.values(), key=lambda one: one.doubted):
            try:
                return await client.tokenize(
                    content, add_special=add_special, parse_special=parse_special
                )
            except BackendRefusedError:
                raise
            except BackendError as error:
                failed = error
        raise failed


class TokenizerRegistry:
    """The tokenizers and readers; backends of the same namespace share a tokenizer."""

    def __init__(
        self, config: TokenizerConfig, tasks: Tasks, is_serving: Callable[[], bool]
    ) -> None:
        """Set up without backends. `is_serving`: whether a request is at work here."""
        self._config, self._is_serving = config, is_serving
        self._tasks = tasks
        self._speakers: dict[Namespace, _Speakers] = {}
        self._tokenizers: dict[Namespace, tuple[BackendId, SegmentTokenizer]] = {}
        self._vocabularies: dict[BackendId, tuple[_Speakers, Vocabulary]] = {}
        self.readers: dict[BackendId, PromptReader] = {}

    def forget(self) -> None:
        """Forget all texts that were read."""
        for reader in self.readers.values():
            reader.forget()

    def leave(self, backend: BackendId, *, keep: bool = False) -> None:
        """Remove a backend that is not up any more; others of its namespace tokenize instead.

        Drop a namespace's tokenizer when its last backend goes; probe again when one comes back.
        `keep`: it may come back as it was, and will say so.
        """
        self.readers.pop(backend, None)
        if not keep:
            self._vocabularies.pop(backend, None)
        for namespace, speakers in tuple(self._speakers.items()):
            speakers.clients.pop(backend, None)
            if not speakers.clients:
                del self._speakers[namespace]
                self._tokenizers.pop(namespace, None)

    async def prepare(
        self,
        client: LlamaClient,
        props: Props,
        namespace: Namespace,
        infill: Sequence[InfillAnswer] = (),
        recalled: bool = False,
    ) -> None:
        """Learn how a backend tokenizes; `infill` are its answers in the probe.

        `recalled`: it tokenizes as before it left. What is known of the same process stays. Raises
        BackendError.
        """
        if self._config.mode is TokenizerMode.OFF:
            return
        _, known = self._vocabularies.get(client.id, (None, None))
        same = known is not None and (known.client, known.media_marker) == (
            client,
            props.media_marker,
        )
        if known is not None and (recalled or same):
            self._come_back(client, props, namespace)
            if infill and known.infill is None:
                known.infill = await self._rule(client, props, infill, known.tokenizer)
            return
        speakers = self._speakers.setdefault(namespace, _Speakers())
        speakers.clients[client.id] = client
        try:
            self.readers[client.id] = await self._reader(client, props, namespace, infill, speakers)
        except BackendError:
            self.leave(client.id)
            raise

    def _come_back(self, client: LlamaClient, props: Props, namespace: Namespace) -> None:
        """Use again what was learned of a backend; only its address and its marker are new."""
        speakers, vocabulary = self._vocabularies[client.id]
        speakers.clients[client.id] = client
        self._speakers.setdefault(namespace, speakers)
        self._tokenizers.setdefault(namespace, (client.id, vocabulary.tokenizer))
        vocabulary.client, vocabulary.media_marker = client, props.media_marker
        self.readers[client.id] = PromptReader(vocabulary)

    async def _reader(
        self,
        client: LlamaClient,
        props: Props,
        namespace: Namespace,
        infill: Sequence[InfillAnswer],
        speakers: _Speakers,
    ) -> PromptReader:
        owner, tokenizer = self._tokenizers.get(namespace, (None, None))
        if tokenizer is None or owner == client.id:
            specials = await discover_specials(
                props.chat_template, props.bos_token, props.eos_token, client.tokenize
            )
            tokenizer = SegmentTokenizer(
                speakers.tokenize,
                specials,
                spawn=self._tasks.spawn,
                cache_bytes=self._config.cache_bytes,
            )
            asked = self._config.mode is TokenizerMode.LOCAL
            local = await self._local(props, specials) if asked else None
            if reason := await tokenizer.self_check(local):
                log.info("tokenizer_whole_texts", backend=client.id, reason=reason)
            if not asked:
                follows = self._use_local(tokenizer, props, specials)
                self._tasks.spawn(follows, name=f"load the tokenizer of {client.id}")
            self._tokenizers[namespace] = (client.id, tokenizer)
        template = None
        if self._config.mode is not TokenizerMode.BACKEND:
            template = await prove(
                props.chat_template, props.bos_token, props.eos_token, client.apply_template
            )
        rule = await self._rule(client, props, infill, tokenizer) if infill else None
        vocabulary = Vocabulary(client, tokenizer, props.media_marker, template, rule)
        self._vocabularies[client.id] = speakers, vocabulary
        return PromptReader(vocabulary)

    async def _rule(
        self,
        client: LlamaClient,
        props: Props,
        infill: Sequence[InfillAnswer],
        tokenizer: SegmentTokenizer,
    ) -> InfillRule | None:
        rule = await learn_rule(
            infill,
            props.bos_token,
            props.n_ctx,
            tokenizer.tokenize_plain,
            partial(tokenizer.tokenize, add_special=False),
            client.detokenize,
        )
        if rule is None:
            log.info("infill_not_read", backend=client.id, reason="its answers fit no rule")
        return rule

    async def _use_local(
        self, tokenizer: SegmentTokenizer, props: Props, specials: dict[str, int]
    ) -> None:
        """Load the model's own vocabulary at a quiet moment, and use it from then on.

        A large one takes a core for seconds. Meanwhile the backend tokenizes.
        """
        quiet = waited = 0
        while quiet < _QUIET and waited < _QUIET_MOST:
            await asyncio.sleep(_LOOKS_S)
            quiet, waited = 0 if self._is_serving() else quiet + 1, waited + 1
        local = await self._local(props, specials)
        if local is not None:
            with suppress(BackendError):  # it went away: the next one tries again
                await tokenizer.try_local(local)

    async def _local(self, props: Props, specials: dict[str, int]) -> LocalTokenizer | None:
        """Load the local tokenizer: the configured one, or the model's own file if it is here.

        None: the backend tokenizes. A failure is logged.
        """
        is_auto = self._config.mode is TokenizerMode.AUTO
        path = Path(props.model_path) if is_auto else self._config.path
        if path is None:
            return None

        def load() -> LocalTokenizer | None:
            return None if is_auto and not path.is_file() else load_local(path, tuple(specials))

        try:
            return await within(in_thread(load, "tokenizer"), _LOADING_S, str(path))
        except (LocalTokenizerError, TimeoutError) as error:
            # `auto` then means `backend`, as documented; `local` was asked for.
            asked = self._config.mode is TokenizerMode.LOCAL
            log.log(
                logging.WARNING if asked else logging.INFO,
                "local_tokenizer_not_used",
                path=str(path),
                reason=str(error),
                key="tokenizer.path" if asked else "tokenizer.mode",
            )
            return None
