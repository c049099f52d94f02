"""`python -m router.servers.prebuilt -m MODEL --port N ...`: a llama-server from a wheel.

The package `xllamacpp` contains llama.cpp's server as a Python extension, so that a machine
without a compiler has one after `pip install`. This module gives it the command line, defaults and
signals of the real program, for the flags that kvferry uses; others have no effect, and are told.
Defaults: common/common.h and tools/server/server.cpp:165-173 of llama.cpp.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.config.llama_flags import USUAL
from router.servers.kv_settings import KV_FLAGS

POOLING = ("none", "mean", "cls", "last", "rank")
# Values of -ctk and -ctv that llama-server accepts (common/arg.cpp, kv_cache_types).
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
# server.cpp:168-173: without -np, four slots over one unified KV.
AUTO_SLOTS = 4


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse llama-server's flags. Exits with code 2 and a message for an unknown flag."""
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
    add = parser.add_argument
    add("-m", "--model", required=True)
    add("-mm", "--mmproj", default="")
    add("-a", "--alias", default="")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8080)
    add("--api-key", default=os.environ.get("LLAMA_API_KEY", ""))
    add("-c", "--ctx-size", type=int, default=0, help="tokens in total; 0: as trained")
    add("-np", "--parallel", type=int, default=-1, help="slots; -1: four, with unified KV")
    add("-kvu", "--kv-unified", dest="kv_unified", action="store_true")
    add("-no-kvu", "--no-kv-unified", dest="kv_unified", action="store_false")
    add("-cram", "--cache-ram", type=int, default=8192, help="MiB; 0: off, -1: no limit")
    add("--cache-idle-slots", dest="cache_idle_slots", action="store_true", default=True)
    add("--no-cache-idle-slots", dest="cache_idle_slots", action="store_false")
    add("--cache-reuse", type=int, default=0)
    add("--cache-prompt", dest="cache_prompt", action="store_true", default=True)
    add("--no-cache-prompt", dest="cache_prompt", action="store_false")
    add("--context-shift", action="store_true")
    add("-ctxcp", "--ctx-checkpoints", type=int, default=32)
    add("--slot-save-path", type=_directory, default="")
    add("-sps", "--slot-prompt-similarity", type=float, default=0.1)
    add("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto")
    add("-ctk", "--cache-type-k", choices=CACHE_TYPES, default="f16")
    add("-ctv", "--cache-type-v", choices=CACHE_TYPES, default="f16")
    add("--swa-full", action="store_true")
    add("--rope-freq-base", type=float, default=0.0)
    add("--lora", action="append", default=[], help="repeatable")
    add("--lora-scaled", action="append", default=[], type=_scaled, help="FILE:SCALE; repeatable")
    add("--sleep-idle-seconds", type=int, default=-1)
    add("-t", "--threads", type=int, default=-1)
    add("-tb", "--threads-batch", type=int, default=-1)
    add("-b", "--batch-size", type=int, default=2048)
    add("-ub", "--ubatch-size", type=int, default=512)
    add("-ngl", "--gpu-layers", "--n-gpu-layers", type=_gpu_layers, default=-1)
    add("-n", "--predict", "--n-predict", type=int, default=-1)
    add("-s", "--seed", type=int, default=None)
    add("--temp", "--temperature", type=float, default=None)
    add("--top-k", type=int, default=None)
    add("--top-p", type=float, default=None)
    add("--min-p", type=float, default=None)
    add("--embeddings", "--embedding", action="store_true")
    add("--pooling", choices=POOLING, default=None, help="None: as the model says")
    add("--chat-template-file", type=Path)
    add("--jinja", dest="jinja", action="store_true", default=True)
    add("--skip-chat-parsing", action="store_true")
    add("--no-jinja", dest="jinja", action="store_false")
    add("--slots", dest="slots", action="store_true", default=True)
    add("--no-slots", dest="slots", action="store_false")
    add("--metrics", action="store_true")
    add("--no-warmup", dest="warmup", action="store_false", default=True)
    args, others = parser.parse_known_args(argv)
    _ignore(others, parser)
    if args.parallel == 0:
        parser.error("-np 0: a server needs at least one slot")
    return args


# Whoever gives these relies on them.
_MUST_HOLD = ("--api-key-file", "--ssl-key-file", "--ssl-cert-file", "--api-prefix")


def _ignore(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Say which flags of llama-server have no effect here.

    One that changes KV or that no llama-server has ends the program.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag = USUAL.of(word)
        if flag is None or flag.name in KV_FLAGS or flag.name in _MUST_HOLD:
            parser.error(f"unrecognized argument: {word}")
        if flag.value and "=" not in word and rest:
            rest.pop(0)
        print(f"llama-server: {word} has no effect in the prebuilt server", file=sys.stderr)


def _directory(value: str) -> str:
    # Without a directory llama-server does not start. It concatenates directory and file name
    # without a separator (arg.cpp:3623-3636).
    if not Path(value).is_dir():
        raise argparse.ArgumentTypeError(f"not a directory: {value}")
    return value if value.endswith(os.sep) else value + os.sep


def _scaled(value: str) -> tuple[str, float]:
    path, _, scale = value.rpartition(":")
    return path, float(scale)


def _gpu_layers(value: str) -> int:
    return {"auto": -1, "all": -2}[value] if value in ("auto", "all") else int(value)


def build_params(args: argparse.Namespace) -> Any:
    """Return the `xllamacpp.CommonParams` for these flags."""
    import xllamacpp  # not at the top: --help and a wrong flag need no extension

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.mmproj.path = args.mmproj
    aliases = {part.strip() for part in args.alias.split(",") if part.strip()}
    params.model_alias = aliases or {args.model}
    named = ("hostnames", [args.host]) if hasattr(params, "hostnames") else ("hostname", args.host)
    setattr(params, *named)  # before b11063 a server had one
    params.port = args.port
    params.api_keys = [key for key in args.api_key.split(",") if key]
    params.n_ctx = args.ctx_size
    params.n_parallel = AUTO_SLOTS if args.parallel < 0 else args.parallel
    params.kv_unified = args.parallel < 0 or bool(args.kv_unified)
    params.cache_ram_mib = args.cache_ram
    params.cache_idle_slots = args.cache_idle_slots
    params.n_cache_reuse = args.cache_reuse
    params.cache_prompt = args.cache_prompt
    params.ctx_shift = args.context_shift
    params.n_ctx_checkpoints = args.ctx_checkpoints
    params.slot_save_path = args.slot_save_path
    params.slot_prompt_similarity = args.slot_prompt_similarity
    flash = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = {
        "on": flash.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        "off": flash.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        "auto": flash.LLAMA_FLASH_ATTN_TYPE_AUTO,
    }[args.flash_attn]
    params.cache_type_k = xllamacpp.ggml_type[f"GGML_TYPE_{args.cache_type_k.upper()}"]
    params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{args.cache_type_v.upper()}"]
    params.swa_full = args.swa_full
    params.rope_freq_base = args.rope_freq_base
    adapters = [(path, 1.0) for path in args.lora] + args.lora_scaled
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(*each) for each in adapters]
    params.sleep_idle_seconds = args.sleep_idle_seconds
    threads = args.threads if args.threads > 0 else os.cpu_count() or 1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = args.threads_batch if args.threads_batch > 0 else threads
    params.n_batch = args.batch_size
    params.n_ubatch = args.ubatch_size
    params.n_gpu_layers = args.gpu_layers
    params.n_predict = args.predict
    if args.seed is not None:
        params.sampling.seed = args.seed % 2**32
    for name in ("temp", "top_k", "top_p", "min_p"):
        if (value := getattr(args, name)) is not None:
            setattr(params.sampling, name, value)
    if args.embeddings:
        params.embedding = True
        params.n_batch = min(params.n_batch, params.n_ubatch)  # as server.cpp:155-163 does
    if args.pooling is not None:
        kind = f"LLAMA_POOLING_TYPE_{args.pooling.upper()}"
        params.pooling_type = xllamacpp.llama_pooling_type[kind]
    params.use_jinja = args.jinja
    params.force_pure_content_parser = args.skip_chat_parsing
    if args.chat_template_file is not None:
        params.chat_template = args.chat_template_file.read_text()
    params.endpoint_slots = args.slots
    params.endpoint_metrics = args.metrics
    params.warmup = args.warmup
    # As arg.cpp:964-967 does at its end; without it some chat templates render differently.
    params.default_template_kwargs = {"preserve_reasoning": "true"}
    return params


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0, or 1 if the server cannot start."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    # Block the signals before the extension starts threads, which inherit the mask: only
    # `sigwait` receives a signal then.
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    import xllamacpp

    try:
        server = xllamacpp.Server(build_params(args))  # returns once the model is loaded
    except (RuntimeError, ValueError) as error:
        print(f"llama-server could not start: {error}", file=sys.stderr, flush=True)
        return 1
    signal.sigwait(stop_signals)
    # A second signal ends a shutdown that hangs, as in the real program.
    for number in stop_signals:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
    del server  # joins the server's threads
    return 0


if __name__ == "__main__":
    sys.exit(main())
