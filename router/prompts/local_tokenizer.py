"""A tokenizer in this process, and the probes that compare it with the backend.

Reads a `tokenizer.json` or the `tokenizer.ggml.*` metadata of a GGUF, never its tensors. The local
tokenizer is a guess at what the engine does: `tokenizer.py` compares it with the backend first.
The backend's own GGUF is the better source: a `tokenizer.json` may normalize (NFC, for the Qwen
family) where llama.cpp does not, and is then refused.
"""

import asyncio
import itertools
import json
import struct
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

INLINE_CHARS = 4096  # about 2 ms of encoding; longer texts go to a thread
MAX_STRING = 64 << 20  # bytes in one GGUF string, elements in one array; more: a broken file


class LocalTokenizerError(RuntimeError):
    """Raised if no tokenizer can be made of a file. The message has the reason, not the path."""


@dataclass(frozen=True, slots=True)
class LocalTokenizer:
    """A tokenizer in this process that parses special tokens and adds none.

    `encode_now` blocks for about 0.5 µs per character; several threads may call it. `least_tokens`
    returns a number of tokens that a text has at least, far sooner.
    """

    encode_now: Callable[[str], list[int]]
    least_tokens: Callable[[str], int] = lambda _text: 0

    async def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; a thread encodes long ones."""
        if len(text) <= INLINE_CHARS:
            return self.encode_now(text)
        return await asyncio.to_thread(self.encode_now, text)


def load_local(path: Path, specials: Iterable[str] = ()) -> LocalTokenizer:
    """Load a tokenizer from an HF folder, a `tokenizer.json` or a GGUF.

    Blocks for seconds: call it in a thread. `specials` are the special tokens that the backend was
    found to have: llama.cpp makes control tokens of some that a vocabulary lists as plain text
    (`</s>` of the Qwen family). Names that the vocabulary lacks are ignored. Raises
    LocalTokenizerError.
    """
    is_gguf = path.suffix == ".gguf"
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe: nobody may ever write it
        raise LocalTokenizerError("is no regular file")
    try:
        made, dropped = (_from_gguf if is_gguf else _from_json)(path)
    except OSError as error:
        raise LocalTokenizerError(f"cannot be read: {error.strerror}") from error
    known = [name for name in specials if made.token_to_id(name) is not None]
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in known])
    ids_of_dropped = frozenset(made.token_to_id(BYTE_TEXTS[byte]) for byte in dropped)

    def encode(text: str) -> list[int]:
        # `encode` keeps the interpreter's lock: 8 MiB stop all threads for 9 s. `encode_batch_fast`
        # releases it, and takes half the time.
        ids: list[int] = made.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [id_ for id_ in ids if id_ not in ids_of_dropped] if ids_of_dropped else ids

    if not is_gguf and made.normalizer is not None:
        return LocalTokenizer(encode)  # a normalized text may be shorter
    longest = max(len(text.encode()) for text in made.get_vocab())

    def least_tokens(text: str) -> int:
        if not dropped:
            return len(text) // longest  # bytes, at least
        return len(text.encode("utf-8", "surrogatepass").translate(None, dropped)) // longest

    return LocalTokenizer(encode, least_tokens)


def _byte_texts() -> list[str]:
    """Return the character that stands for each byte (`unicode_byte_to_utf8`, src/unicode.cpp)."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in own else next(others)) for byte in range(256)]


BYTE_TEXTS = _byte_texts()


def _without_token(vocabulary: Container[str]) -> bytes:
    """Return the bytes that are no token of a vocabulary of bytes.

    The engine drops them after merging, `tokenizers` before: `" \x13}"` would become `" }"`. So
    they get tokens of their own, and their ids are dropped after.
    """
    return bytes(byte for byte, text in enumerate(BYTE_TEXTS) if text not in vocabulary)


def _from_json(path: Path) -> tuple[Tokenizer, bytes]:
    text = (path / "tokenizer.json" if path.is_dir() else path).read_text("utf-8")
    dropped = b""
    try:
        made = Tokenizer.from_str(text)
        if "ByteLevel" in str(made.pre_tokenizer) and isinstance(made.model, models.BPE):
            dropped = _without_token(made.get_vocab())
        if dropped:
            data = json.loads(text)
            first = max(made.get_vocab().values()) + 1
            data["model"]["vocab"] |= {
                BYTE_TEXTS[byte]: id_ for id_, byte in enumerate(dropped, first)
            }
            made = Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the bindings raise nothing narrower
        raise LocalTokenizerError(f"not a tokenizer.json: {error}") from error
    return made, dropped


# --- GGUF metadata: ggml/include/gguf.h, versions 2 and 3 ---------------------------------------

_SCALARS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")
_STRING, _ARRAY = 8, 9

Value = int | float | str | list[int] | list[float] | list[str]


def _unpack(file: BinaryIO, layout: str, n: int = 1) -> tuple[int, ...]:
    form = f"<{n}{layout}"
    data = file.read(struct.calcsize(form))
    try:
        return struct.unpack(form, data)
    except struct.error as error:
        raise LocalTokenizerError("the GGUF ends inside its metadata") from error


def _string(file: BinaryIO) -> str:
    (n,) = _unpack(file, "Q")
    if n > MAX_STRING:
        raise LocalTokenizerError("a string in the GGUF is too long: the file is broken")
    return file.read(n).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Value:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        (inner,), (n,) = _unpack(file, "I"), _unpack(file, "Q")
        if n > MAX_STRING or inner == _ARRAY or inner >= len(_SCALARS):
            raise LocalTokenizerError("an array in the GGUF is too long or of an unknown type")
        if inner == _STRING:
            return [_string(file) for _ in range(n)]
        return list(_unpack(file, _SCALARS[inner], n))
    if kind >= len(_SCALARS):
        raise LocalTokenizerError("a value in the GGUF has an unknown type")
    return _unpack(file, _SCALARS[kind])[0]


def read_gguf_metadata(path: Path, prefix: str = "tokenizer.") -> dict[str, Value]:
    """Return the values of keys with `prefix`. Raises LocalTokenizerError and OSError."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF" or _unpack(file, "I")[0] not in (2, 3):
            raise LocalTokenizerError("not a GGUF of version 2 or 3")
        _, n_values = _unpack(file, "Q", 2)
        found: dict[str, Value] = {}
        for _ in range(n_values):
            key = _string(file)
            value = _value(file, _unpack(file, "I")[0])
            if key.startswith(prefix):
                found[key] = value
        return found


# --- Tokenizers from that metadata --------------------------------------------------------------

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (f"{_HEAD}{_UPPER}*{_LOWER}+", f"{_HEAD}{_UPPER}+{_LOWER}*")
_GPT4O = "|".join(form + _CONTRACTIONS + "?" for form in _CASED) + r"|\p{N}{1,3}" + _TAIL
_TEKKEN = "|".join(_CASED) + r"|\p{N}" + _TAIL
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

# `tokenizer.ggml.pre` -> expressions of llm_tokenizer_bpe (src/llama-vocab.cpp, b11434).
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "mellum2"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), (_LLAMA3,)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "default": _DEFAULT,
}
# `ignore_merges`: a fragment that is a token stays whole, whatever its merges say.
_WHOLE_FIRST = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "glm4", "tekken")
)
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


def _strings(metadata: dict[str, Value], key: str) -> list[str]:
    value = metadata.get("tokenizer.ggml." + key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise LocalTokenizerError(f"the GGUF has no tokenizer.ggml.{key}")
    return [str(item) for item in value]


def _from_gguf(path: Path) -> tuple[Tokenizer, bytes]:
    """Return a tokenizer, and the bytes of which it makes ids that the engine does not."""
    metadata = read_gguf_metadata(path)
    tokens = _strings(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise LocalTokenizerError("the GGUF has no tokenizer.ggml.token_type for each token")
    model, dropped = metadata.get("tokenizer.ggml.model"), b""
    if model == "gpt2":
        dropped = _without_token(frozenset(tokens))
        made = _byte_level(metadata, [*tokens, *(BYTE_TEXTS[byte] for byte in dropped)])
    elif model == "llama":
        made = _sentencepiece(metadata, tokens)
    else:
        raise LocalTokenizerError(f"tokenizer.ggml.model {model!r} is not supported")
    # The engine splits at these tokens before all else, the longest first.
    apart = [
        AddedToken(text, special=kind != _USER_DEFINED, normalized=False)
        for text, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and text
    ]
    made.add_tokens(sorted(apart, key=lambda token: -len(token.content.encode())))
    return made, dropped


def _byte_level(metadata: dict[str, Value], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise LocalTokenizerError(f"tokenizer.ggml.pre {pre!r} is not supported")
    merges = []
    for merge in _strings(metadata, "merges"):
        at = merge.find(" ", 1)  # the first half may itself begin with a space
        merges.append((merge[:at], merge[at + 1 :]))
    made = Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre in _WHOLE_FIRST,
        )
    )
    splits = [pre_tokenizers.Split(Regex(form), "isolated") for form in _SPLITS[str(pre)]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    return made


def _sentencepiece(metadata: dict[str, Value], tokens: list[str]) -> Tokenizer:
    """Build a BPE tokenizer that merges by score.

    llm_tokenizer_spm joins the two neighbours that form the token with the best score.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise LocalTokenizerError("the GGUF has no tokenizer.ggml.scores for each token")
    ids = {text: i for i, text in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, i in ids.items():
        for at in range(1, len(text)):
            left, right = ids.get(text[:at]), ids.get(text[at:])
            if left is not None and right is not None:
                ranked.append((-float(scores[i]), left, right, text[:at], text[at:]))
    ranked.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    made = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[(a, b) for *_, a, b in ranked],
            byte_fallback=True,
            fuse_unk=False,
            unk_token=tokens[int(unknown)] if isinstance(unknown, int) else None,
        )
    )
    space = normalizers.Replace(" ", "▁")
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        made.normalizer = normalizers.Sequence([normalizers.Prepend(" "), space])
    else:
        made.normalizer = space
    return made


# --- Probes -------------------------------------------------------------------------------------

TEXTS = (
    "Hello, how are you?",
    "  two spaces before, two after  ",
    "",
    "a\n\n\nb\r\n\tc \n d\n",
    "def f(x: int) -> int:\n    return x**2  # 'ok' != \"no\"\n",
    "0 12 345 6789 1,234,567.89 2026-10-06T12:34:56Z 0xFF",
    "漢字かな交じり文。한국어 中文，标点！",
    "👩‍👩‍👧‍👦🇩🇪 👍🏽 ∑∂ → ★",
    "naïve Straße e\u0301 ﬁ İ \u00a0\u3000\u200b end",
    "مرحبا שלום हिन्दी ไทย Привет Γειά",
    "it's I'LL they've DON'T we'd",
    ' {"json": [1, null, true]} <b>tag</b> </div> [x](https://e.org/?a=b&c=%20)',
    "   ",
    "\n",
)


def probes_alone(special: str) -> list[str]:
    shapes = ("{}", "a{}b", "a {} b", "a\n{}\nb", "{}{}", "{} {}", " \t{}", "{}  \n", "x  {}{}  y")
    return [shape.replace("{}", special) for shape in shapes]


def probes_together(specials: Sequence[str]) -> list[str]:
    names = specials or [""]
    chain = [
        f"{text}{names[i % len(names)]}{TEXTS[i - 1]}{names[(i + 1) % len(names)]}{text}"
        for i, text in enumerate(TEXTS)
    ]
    return [*TEXTS, *chain, "".join(chain), *(between.join(names) for between in ("", " ", "\n"))]
