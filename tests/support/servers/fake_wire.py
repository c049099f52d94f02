"""Wire formats of the fake llama-server: its state files, answers in four dialects, and faults.

The shapes are those of a real server (build b11434), without fields that kvferry does not read;
test_contract.py compares the two. Section numbers are those of llama-server.md.
"""

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

MAGIC, VERSION = 0x67677371, 4  # section 1.4
ROW = struct.Struct("<4i")  # one layer; rows of 16 bytes repeat the token, so a mix-up shows
F16 = 1
N_VOCAB = 256
DEFAULT_PREDICT = 16  # tokens; llama-server would go on until the model stops
Json = dict[str, Any]


@dataclass
class Faults:
    """Faults, all off at first. Set at any time, also between the chunks of a stream."""

    loading: bool = False  # 503 on every route (section 5.5)
    hang: bool = False  # completions never answer a byte
    die_at_once: bool = False  # the connection of a completion breaks before any byte
    says: bytes | None = None  # raw, instead of a completion's answer; then the connection breaks
    die_after_chunks: int | None = None  # the connection breaks after so many tokens of a stream
    hang_after_chunks: int | None = None  # nothing comes after so many tokens of a stream
    encodes: bool = False  # plain answers have a Content-Encoding; their text is readable inside
    padding_bytes: int = 0  # a comment of this size goes out before each token of a stream
    refuses: str = ""  # 500 to every completion, with this message
    save_fails: bool = False  # 500 "Unable to save slot", as with a full disk
    save_lies: bool = False  # reports more bytes than it wrote (section 0.4)
    restore_fails: bool = False  # 400, and the slot is empty after it (section 0.5)
    hang_actions: bool = False  # slot actions never answer
    ignores_leaving: bool = False  # an abandoned request keeps its slot until its answer is done


def next_token(context: list[int]) -> int:
    """Return a small letter that depends on every token of the context."""
    return ord("a") + zlib.crc32(bytes(context)) % 26


def generate(prompt: list[int], n: int) -> list[int]:
    """Return the fake's answer to `prompt`."""
    context = list(prompt)
    for _ in range(n):
        context.append(next_token(context))
    return context[len(prompt) :]


def render_chat(messages: list[Json]) -> str:
    """Return ChatML with the generation prompt."""
    parts = [f"<|im_start|>{m['role']}\n{_text(m.get('content'))}<|im_end|>\n" for m in messages]
    return "".join(parts) + "<|im_start|>assistant\n"


def _render_body(body: Json) -> str:
    return render_chat(body["messages"])


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def render_messages(body: Json) -> str:
    """Render the Anthropic dialect as chat: `system` becomes a message."""
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return render_chat(system + list(body["messages"]))


def props_json(model: str, n_slots: int, n_ctx: int, marker: str) -> Json:
    """Return the body of GET /props."""
    return {
        "default_generation_settings": {"params": {}, "n_ctx": n_ctx},
        "total_slots": n_slots,
        "model_alias": model,
        "model_path": f"/models/{model}.gguf",
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": marker,
        "chat_template": "{# ChatML #}",
        "build_info": "b0-fake",
        "is_sleeping": False,
    }


def models_json(model: str, n_ctx: int) -> Json:
    """Return the body of GET /v1/models."""
    sizes = {"n_vocab": N_VOCAB, "n_ctx": n_ctx, "n_ctx_train": 65536, "n_embd": 4}
    meta = {"vocab_type": 2, "n_params": 1, "size": 1, "ftype": "F16"} | sizes
    entry = {"id": model, "aliases": [model], "object": "model", "meta": meta}
    return {"object": "list", "data": [entry]}


def error_json(status: int, message: str, kind: str = "invalid_request_error") -> Json:
    """Return the body of an error on any route."""
    return {"error": {"code": status, "message": message, "type": kind}}


def context_error_json(n_prompt: int, n_ctx: int) -> Json:
    """Return the error for a prompt that fills the slot (section 2.3)."""
    answer = error_json(
        400,
        f"request ({n_prompt} tokens) exceeds the available context size "
        f"({n_ctx} tokens), try increasing it",
        "exceed_context_size_error",
    )
    answer["error"] |= {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx}
    return answer


def encode_state(tokens: list[int], slot: int, n_stream: int) -> bytes:
    """Return a full-attention state file of one layer (section 1.4), as saved from `slot`."""
    n = len(tokens)
    parts = [struct.pack("<3IiII", MAGIC, VERSION, n + 4, -1, 1, n)]
    parts += [struct.pack(f"<{n}i", *tokens), struct.pack("<I", 0)]
    parts += [struct.pack("<I", n_stream)]
    rows = b"".join(ROW.pack(token, token, token, token) for token in tokens)
    for stream in range(n_stream):
        if n == 0 or stream != (slot if n_stream > 1 else 0):
            parts.append(struct.pack("<I", 0))
            continue
        parts.append(struct.pack("<I", n))
        parts += [struct.pack("<iIi", position, 1, slot) for position in range(n)]
        parts.append(struct.pack("<4I", 0, 1, 0, 0))
        parts += [struct.pack("<iQ", F16, ROW.size) + rows] * 2  # K, then V not transposed
    return b"".join(parts)


def decode_state(data: bytes, n_stream: int) -> list[int]:
    """Return the tokens. Raises ValueError unless all is as `encode_state` writes it."""
    try:
        magic, version, n_words, marker, layout, n = struct.unpack_from("<3IiII", data)
        tokens = list(struct.unpack_from(f"<{n}i", data, 24))
        n_media, streams = struct.unpack_from("<II", data, 24 + 4 * n)
        if (magic, version, n_words, marker, layout) != (MAGIC, VERSION, n + 4, -1, 1):
            raise ValueError("head")
        if n_media or streams != n_stream:
            raise ValueError("n_stream mismatch")
        at, cells = 32 + 4 * n, 0
        for _ in range(streams):
            (count,) = struct.unpack_from("<I", data, at)
            at += 4
            if count:
                at, cells = _decode_stream(data, at, tokens), cells + count
    except struct.error as error:
        raise ValueError(f"truncated: {error}") from None
    if cells != n:
        raise ValueError(f"{cells} cells for {n} tokens")
    return tokens


def _decode_stream(data: bytes, at: int, tokens: list[int]) -> int:
    n = len(tokens)
    positions = [struct.unpack_from("<iIi", data, at + 12 * i)[0] for i in range(n)]
    if sorted(positions) != list(range(n)):
        raise ValueError("positions")
    at += 12 * n
    if struct.unpack_from("<4I", data, at) != (0, 1, 0, 0):
        raise ValueError("incompatible V transposition or layers")
    at += 16
    for _ in range(2):
        if struct.unpack_from("<iQ", data, at) != (F16, ROW.size):
            raise ValueError("row type or size")
        at += 12
        for i, position in enumerate(positions):
            if ROW.unpack_from(data, at + ROW.size * i) != (tokens[position],) * 4:
                raise ValueError("K or V of another token")
        at += ROW.size * n
    return at


def common(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class Answer:
    """One completion: the request, the generated tokens, and how both look on the wire."""

    def __init__(self, path: str, body: Json, model: str) -> None:
        self.body, self.model = body, model
        self.native = path == "/completion"
        self.chat = path == "/v1/chat/completions"
        self.anthropic = path == "/v1/messages"
        self.stream = bool(body.get("stream", False))
        self.prompt = self._read_prompt()
        asked = body.get("n_predict", body.get("max_tokens"))
        self.limited = isinstance(asked, int) and asked >= 0
        # The Anthropic route drops `id_slot` (section 2.1).
        self.pinned = -1 if self.anthropic else int(body.get("id_slot", -1))
        # With n_predict 0 one token is sampled all the same; it does not get into the KV.
        self.n_predict = max(1, int(asked or 0)) if self.limited else DEFAULT_PREDICT
        self.tokens: list[int] = []
        self.cache_n = 0
        self.id_slot = -1

    def _read_prompt(self) -> list[int] | None:
        if self.chat or self.anthropic:
            if not self.body.get("messages"):
                return None
            render = render_messages if self.anthropic else _render_body
            return list(render(self.body).encode())
        prompt = self.body.get("prompt")
        if isinstance(prompt, str):
            return list(prompt.encode())
        return [int(token) for token in prompt] if isinstance(prompt, list) else None

    @property
    def n_prompt(self) -> int:
        """Return the number of prompt tokens."""
        return len(self.prompt or [])

    def timings(self) -> Json:
        """Return timings as server-common.cpp:84-105; milliseconds are made up, but constant."""
        prompt_n, predicted_n = self.n_prompt - self.cache_n, len(self.tokens)
        return {
            "cache_n": self.cache_n,
            "prompt_n": prompt_n,
            "prompt_ms": 0.1 * prompt_n,
            "prompt_per_token_ms": 0.1,
            "prompt_per_second": 10_000.0,
            "predicted_n": predicted_n,
            "predicted_ms": 1.0 * predicted_n,
            "predicted_per_token_ms": 1.0,
            "predicted_per_second": 1_000.0,
        }

    def usage(self) -> Json:
        """Return the usage (section 2.4)."""
        return {
            "completion_tokens": len(self.tokens),
            "prompt_tokens": self.n_prompt,
            "total_tokens": self.n_prompt + len(self.tokens),
            "prompt_tokens_details": {"cached_tokens": self.cache_n},
        }

    def _envelope(self, kind: str) -> Json:
        return {
            "created": 1,
            "id": "chatcmpl-fake",
            "model": self.model,
            "system_fingerprint": "b0-fake",
            "object": kind,
        }

    @property
    def _reason(self) -> str:
        return "length" if self.limited else "stop"

    def whole(self) -> Json:
        """Return the answer to a request that does not stream."""
        text = bytes(self.tokens).decode()
        if self.native:
            tokens = self.tokens if self.body.get("return_tokens") else []
            return self._final() | {"content": text, "tokens": tokens} | self._probabilities()
        if self.anthropic:
            said = {"content": [{"type": "text", "text": text}], "stop_reason": "max_tokens"}
            return self._message() | said
        if self.chat:
            message = {"role": "assistant", "content": text}
            choice = {"finish_reason": self._reason, "index": 0, "message": message}
        else:
            choice = {"finish_reason": self._reason, "index": 0, "text": text, "logprobs": None}
        envelope = self._envelope("chat.completion" if self.chat else "text_completion")
        verbose = {"__verbose": {"tokens": self.tokens}} if self.body.get("verbose") else {}
        told = {"choices": [choice], "usage": self.usage(), "timings": self.timings()}
        return envelope | told | verbose

    def _probabilities(self) -> Json:
        """Return the probabilities for `n_probs`, of the first token alone."""
        if not self.body.get("n_probs"):
            return {}
        first = self.tokens[0]
        top = [{"id": (first + i) % N_VOCAB, "logprob": -0.5 - i} for i in range(5)]
        return {"completion_probabilities": [top[0] | {"top_logprobs": top}]}

    def _message(self) -> Json:
        """Return an Anthropic message without its content."""
        cached = {"cache_read_input_tokens": self.cache_n}
        usage = {"input_tokens": self.n_prompt - self.cache_n, "output_tokens": len(self.tokens)}
        envelope = {"id": "msg_fake", "type": "message", "role": "assistant", "content": []}
        return envelope | {"model": self.model, "stop_reason": None, "usage": cached | usage}

    def _final(self) -> Json:
        return {
            "index": 0,
            "content": "",
            "tokens": [],
            "id_slot": self.id_slot,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(self.tokens),
            "tokens_evaluated": self.n_prompt,
            "truncated": False,
            "stop_type": "limit" if self.limited else "eos",
            "stopping_word": "",
            "tokens_cached": self.n_prompt + len(self.tokens) - 1,
            "timings": self.timings(),
        }

    def _partial(self, tokens: list[int]) -> Json:
        return {
            "index": 0,
            "content": bytes(tokens).decode(),
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,  # section 2.3: only the last event has the real one
            "tokens_predicted": len(self.tokens),
            "tokens_evaluated": self.n_prompt,
        }

    def progress(self, processed: int) -> bytes:
        """Return a `prompt_progress` event."""
        state = {
            "total": self.n_prompt,
            "cache": self.cache_n,
            "processed": processed,
            "time_ms": 0,
        }
        if self.native:  # a real server, too, sends a meaningless token 0 here
            event = self._partial([]) | {"tokens": [0]}
        else:
            event = self._chunk({"role": "assistant", "content": None}, "", None)
        return _event(event | {"prompt_progress": state})

    def chunk(self, token: int) -> bytes:
        """Return the event of a token; before the first of a chat also one that names the role."""
        if self.native:
            return _event(self._partial([token]))
        text = bytes([token]).decode()
        if self.anthropic:
            delta = {"index": 0, "delta": {"type": "text_delta", "text": text}}
            event = _typed("content_block_delta", delta)
            if len(self.tokens) > 1:
                return event
            block = {"index": 0, "content_block": {"type": "text", "text": ""}}
            start = _typed("message_start", {"message": self._message()})
            return start + _typed("content_block_start", block) + event
        event = _event(self._chunk({"content": text}, text, None))
        if self.chat and len(self.tokens) == 1:
            return _event(self._chunk({"role": "assistant", "content": None}, "", None)) + event
        return event

    def _chunk(self, delta: Json, text: str, reason: str | None) -> Json:
        choice: Json = {"finish_reason": reason, "index": 0}
        choice |= {"delta": delta} if self.chat else {"text": text, "logprobs": None}
        envelope = self._envelope("chat.completion.chunk" if self.chat else "text_completion")
        return envelope | {"choices": [choice]}

    def last_chunks(self) -> bytes:
        """Return the end of a stream. The native dialect has no [DONE]."""
        if self.native:
            return _event(self._final())
        if self.anthropic:
            usage = {"output_tokens": len(self.tokens)}
            delta = {"delta": {"stop_reason": "max_tokens"}, "usage": usage}
            ends = _typed("message_delta", delta) + _typed("message_stop", {})
            return _typed("content_block_stop", {"index": 0}) + ends
        last = self._chunk({}, "", self._reason)
        done = b"data: [DONE]\n\n"
        if not self.chat:
            return _event(last | {"usage": self.usage(), "timings": self.timings()}) + done
        options = self.body.get("stream_options") or {}
        if not options.get("include_usage"):
            return _event(last | {"timings": self.timings()}) + done
        counts = {"choices": [], "usage": self.usage(), "timings": self.timings()}
        return _event(last) + _event(self._chunk({}, "", None) | counts) + done


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _typed(kind: str, data: Json) -> bytes:
    return f"event: {kind}\n".encode() + _event({"type": kind} | data)
