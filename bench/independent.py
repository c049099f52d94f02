"""What benchmarks that others wrote say of llama-server alone, and with kvferry in front.

    python -m bench.independent [--only NAME] [--markdown FILE]

Each program is installed from the package index in an environment of its own, pinned, and runs
against fresh servers: a llama-server with its defaults (its RAM cache among them), then
kvferry with a llama-server of its own. Counts of computed tokens are the servers' counters in
both. A program says what it says; its failed requests are shown.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import md5
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import aiohttp

from router.servers.program import find_server, free_port
from router.tools.demo.model import small_model

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".cache" / "independent"
SLOTS, CTX, THREADS = 4, 16_384, 1
MODEL = "smollm2"
_READY_S, _PROGRAM_S = 120.0, 240.0
# llama-server ends a connection after a stream that it called kept: aiohttp's pool then fails.
_NO_POOL = """import aiohttp.connector as c
_made = c.TCPConnector.__init__
def __init__(self, *given, **more):
    more.pop("keepalive_timeout", None)
    more["force_close"] = True
    _made(self, *given, **more)
c.TCPConnector.__init__ = __init__
"""
_ARMS = ("llama-server", "kvferry")


@dataclass(frozen=True)
class Result:
    """What a program says: its own number, the mean time to the first token, failed requests."""

    own: str
    ttft_s: float | None
    failed: int = 0


@dataclass(frozen=True)
class Program:
    """A benchmark. `command` fills in url, tok, out, dir and home; `read` reads what it left."""

    name: str
    package: str
    says: str  # what its own number is
    command: str
    read: Callable[[Path, str], Result]
    python: tuple[int, int] = (3, 11)
    env: dict[str, str] = field(default_factory=dict)
    pools: bool = False  # its pool of connections fails against a plain llama-server


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _cache_pressure(out: Path, _: str) -> Result:
    told = _json(out)
    times = [one["ttft"] for one in told["verify"]]
    return Result(f"{told['retained']} of {told['num_contexts']}", fmean(times))


def _agent_sim(out: Path, _: str) -> Result:
    records = _json(out)["records"]
    prompt, cached = (sum(one[key] or 0 for one in records) for key in ("prompt", "cached"))
    failed = sum(bool(one["error"]) for one in records)
    later = [one["ttft"] for one in records if one["step"] and one["ttft"]]
    return Result(f"{100 * cached / prompt:.1f} %", fmean(later) if later else None, failed)


def _abort_sim(out: Path, _: str) -> Result:
    records = [one for one in _json(out)["records"] if one.get("reuse") is not None]
    times = [one["reprompt_wall"] for one in records]
    return Result(f"{100 * fmean(one['reuse'] for one in records):.0f} %", fmean(times))


def _servebench(out: Path, _: str) -> Result:
    told = _json(out)["levels"][0]["summary"]
    return Result(f"{told['duration']:.1f} s", told["ttft"]["mean"], told["failed"])


def _llama_benchy(out: Path, _: str) -> Result:
    (told,) = [one for one in _json(out)["benchmarks"] if not one["is_context_prefill_phase"]]
    return Result(f"{told['pp_throughput']['mean']:.0f} t/s", told["e2e_ttft"]["mean"] / 1000)


def _agentic(out: Path, _: str) -> Result:
    told = json.loads(out.read_text().splitlines()[-1])["metrics"]
    share = told["prefix_cache_ratio"]
    share = share if share > 1 else 100 * share
    return Result(f"{share:.1f} %", told["t2plus_ttft"]["mean_ms"] / 1000,
                  32 - told["successful_turns"])  # fmt: skip


def _trie(_: Path, text: str) -> Result:
    line = next(line for line in reversed(text.splitlines()) if "benchmark complete" in line)
    told = {key: float(value) for key, value in re.findall(r"\b(\w+)=([\d.]+)", line)}
    return Result(f"{told['eligible_cache_hit_rate_pct_mean']:.1f} %", told["ttft_s_mean"],
                  int(told.get("failed_requests", 0)))  # fmt: skip


def _guidellm(out: Path, _: str) -> Result:
    told = _json(out)["benchmarks"][0]
    done = told["requests"]["successful"]
    cached, prompt = (sum(one.get(key) or 0 for one in done)
                      for key in ("cached_tokens", "prompt_tokens"))  # fmt: skip
    ttft = told["metrics"]["time_to_first_token_ms"]["successful"]["mean"] / 1000
    failed = told["metrics"]["request_totals"]["errored"]
    return Result(f"{100 * cached / prompt:.1f} %", ttft, failed)


def _aiperf(out: Path, _: str) -> Result:
    told = _json(out.parent / "aiperf" / "profile_export_aiperf.json")
    share = told["overall_usage_prompt_cache_read_pct"]["avg"]
    return Result(f"{share:.1f} %", told["time_to_first_token"]["avg"] / 1000)


def _inference_perf(out: Path, _: str) -> Result:
    (summary,) = out.parent.rglob("summary_lifecycle_metrics.json")
    told = _json(summary)
    ttft = told["successes"]["latency"]["time_to_first_token"]["mean"]
    seconds = told.get("benchmark_time_seconds") or 0.0
    return Result(f"{seconds:.1f} s", ttft, told["failures"]["count"])


def _genai_bench(out: Path, _: str) -> Result:
    (path,) = out.parent.rglob("D300_16_*_time_*s.json")
    told = _json(path)["aggregated_metrics"]
    return Result(f"{told['run_duration']:.1f} s", told["stats"]["ttft"]["mean"] / 1000,
                  told["num_error_requests"])  # fmt: skip


OFFLINE = {"HF_HUB_OFFLINE": "1"}
_TRACE = (
    '{"num_turns":3,"input_prompt_length":150,"assistant_response_length":[12,12,12],'
    '"tool_call_output_length":[60,60,60],"tool_call_latency":[0.2,0.2,0.2],'
    '"final_assistant_response_length":12}\n'
)
_INFERENCE_PERF = """api: {{type: chat, streaming: true}}
data:
  type: shared_prefix
  shared_prefix: {{num_unique_system_prompts: 4, num_users_per_system_prompt: 2,
    system_prompt_len: 150, question_len: 60, output_len: 12, seed: 1,
    enable_multi_turn_chat: true}}
load: {{type: concurrent, num_workers: 1, request_timeout: 120, request_retries: 3,
  stages: [{{num_requests: 24, concurrency_level: 6}}]}}
server: {{type: vllm, model_name: {model}, base_url: "{url}", ignore_eos: true}}
tokenizer: {{pretrained_model_name_or_path: {tok}}}
report: {{request_lifecycle: {{summary: true, per_stage: true, per_request: true}}}}
storage: {{local_storage: {{path: {dir}/inference-perf}}}}
"""

PROGRAMS = (
    Program(
        "cache-pressure", "cache-pressure==0.6.3", "contexts kept",
        "cache-pressure --base-url {url}/v1 --model {model} --kv-size 2500 --context-tokens 400"
        " --num-contexts 7 --output {out}", _cache_pressure, (3, 12),
    ),
    Program(
        "agent-sim", "cache-pressure==0.6.3", "cached share of prompts",
        "agent-sim --base-url {url}/v1 --model {model} --sessions 6 --main-tokens 600 --step-tokens"
        " 150 --sub-windows 1 --sub-tokens 150 --finalize-tokens 50 --max-tokens 12 --max-context"
        " 4096 --miss-threshold 0 --salt 42 --no-viz --timeout 120 --output {out}",
        _agent_sim, (3, 12),
    ),
    Program(
        "abort-sim", "cache-pressure==0.6.3", "reused after an abort",
        "abort-sim --base-url {url}/v1 --model {model} --context-tokens 600 --thinking-tokens 40"
        " --max-tokens 256 --max-context 4096 --runs 5 --min-reuse 0.8 --salt 7 --timeout 120"
        " --output {out}", _abort_sim, (3, 12),
    ),
    Program(
        "servebench", "servebench==1.1.3", "24 requests took",
        "servebench run --url {url}/v1 --model {model} --concurrency 6 --num-requests 24"
        " --input-len"
        " 300 --shared-prefix-tokens 250 --output-len 16 --warmup 0 --seed 1 --no-gpu --timeout 120"
        " --out {out}", _servebench, pools=True,
    ),
    Program(
        "llama-benchy", "llama-benchy==0.4.0", "prompt speed of the second phase",
        "llama-benchy --base-url {url}/v1 --model {model} --tokenizer {tok} --book-url"
        " http://127.0.0.1/book --depth 300 --pp 32 --tg 8 --concurrency 6 --runs 3 --no-warmup"
        " --no-adapt-prompt --skip-coherence --latency-mode none --enable-prefix-caching"
        " --save-result {out} --format json", _llama_benchy, env=OFFLINE | {"HOME": "{home}"},
    ),
    Program(
        "agentic-bench", "agentic-bench[tokenizer]==0.2.0", "prefix cache ratio",
        "abench run --base-url {url} --backend openai --model {model} --tokenizer {tok}"
        " --dataset-name random --system-prompt-len 150 --turns 4 --input-increment 120"
        " --output-len 12 --num-sessions 8 --max-concurrency 6 --no-gaps --warmup-requests 0 --seed"
        " 42 --turn-timeout 120 --progress-interval 0 --metrics-interval 0 --disable-tqdm"
        " --output-file {out}", _agentic, env=OFFLINE, pools=True,
    ),
    Program(
        "tokenspeed-trie", "tokenspeed-trie==0.1.1.post20260523", "eligible hit rate",
        "trie workload_path={dir}/trace.jsonl endpoint={url}/v1 model={model} tokenizer_model={tok}"
        " concurrency=8 duration=40 stream=True seed=1 api_key=x", _trie,
        env=OFFLINE | {"COLUMNS": "200", "NO_COLOR": "1"},
    ),
    Program(
        "guidellm", "torch==2.13.0 guidellm==0.8.1", "cached share of prompts",
        "guidellm run --backend kind=openai_http,target={url},model={model},request_format="
        "/v1/chat/completions --profile kind=concurrent,streams=6 --tokenizer"
        " kind=huggingface_auto,model={tok} --data kind=synthetic_text,prompt_tokens=80,"
        "output_tokens=12,turns=3,prefix_tokens=150,prefix_count=4 --constraint"
        " kind=max_requests,count=30 --constraint kind=max_duration,seconds=90 --seed"
        " kind=static,value=1 --output kind=json,path={out} --disable-progress", _guidellm,
        env=OFFLINE,
    ),
    Program(
        "aiperf", "aiperf==0.13.0", "cached share of prompts",
        "aiperf profile -m {model} -u {url} --endpoint-type chat --streaming --tokenizer {tok}"
        " --concurrency 6 --conversation-num 8 --conversation-turn-mean 3"
        " --conversation-turn-stddev 0 --conversation-turn-delay-mean 200"
        " --shared-system-prompt-length 120 --isl 80 --osl 12 --extra-inputs ignore_eos:true"
        " --use-server-token-count --connection-reuse-strategy never --random-seed 1"
        " --workers-max 1"
        " --no-gpu-telemetry --ui-type none --request-timeout-seconds 120"
        " --output-artifact-dir {dir}/aiperf", _aiperf, (3, 12),
    ),
    Program(
        "inference-perf", "inference-perf==0.7.0", "24 requests took",
        "inference-perf -c {dir}/inference-perf.yaml", _inference_perf, (3, 12), env=OFFLINE,
    ),
    Program(
        "genai-bench", "genai-bench==0.0.5", "24 requests took",
        "genai-bench benchmark --api-backend openai --api-base {url} --api-key x --api-model-name"
        " {model} --model-tokenizer {tok} --model {model} --task text-to-text --traffic-scenario"
        " D(300,16) --prefix-len 240 --num-concurrency 6 --max-requests-per-run 24"
        " --max-time-per-run 2 --experiment-base-dir {dir} --experiment-folder-name r"
        " --log-dir {dir}"
        " --metrics-time-unit ms", _genai_bench, (3, 12), env=OFFLINE,
    ),
)  # fmt: skip


def python_for(version: tuple[int, int]) -> str | None:
    """Return a Python of at least a version, below 3.13; None: there is none here."""
    if version <= sys.version_info[:2] < (3, 13):
        return sys.executable
    found = [shutil.which("python3.12"), *Path.home().glob(".pyenv/versions/3.12*/bin/python")]
    for python in map(str, filter(None, found)):  # a shim may be there without a Python behind it
        if subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0:
            return python
    return None


def install(program: Program) -> Path | None:
    """Return the programs of its environment, made if it is not there; None: it cannot be."""
    python = python_for(program.python)
    if python is None:
        return None
    folder = VENVS / re.sub(r"\W+", "-", program.package.split()[-1])
    done = folder / ".done"
    if not done.exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *program.package.split()], check=True)
        if program.pools:
            (packages,) = (folder / "lib").glob("python3*/site-packages")
            (packages / "no_pool.py").write_text(_NO_POOL)
            (packages / "no_pool.pth").write_text("import no_pool\n")
        done.touch()
    return folder / "bin"


def tokenizer_of(model: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF as Hugging Face's files."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(str(model)).fields

    def texts(key: str) -> list[str]:
        return [bytes(fields[key].parts[at]).decode() for at in fields[key].data]

    tokens, merges = texts("tokenizer.ggml.tokens"), texts("tokenizer.ggml.merges")
    kinds = fields["tokenizer.ggml.token_type"]
    special = [
        token for token, at in zip(tokens, kinds.data, strict=True) if kinds.parts[at][0] == 3
    ]
    pairs = [(one.split(" ")[0], one.split(" ")[1]) for one in merges]
    made = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": bytes(fields["tokenizer.chat_template"].parts[-1]).decode(),
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


@asynccontextmanager
async def arm(name: str, model: Path, folder: Path) -> AsyncIterator[str]:
    """Start a contender with fresh servers; yield its URL."""
    port = free_port()
    url, env = f"http://127.0.0.1:{port}", dict(os.environ)
    if name == "llama-server":
        command = [
            *(*find_server(), "-m", str(model), "-a", MODEL, "--port", str(port)),
            *("-np", str(SLOTS), "-c", str(CTX), "-t", str(THREADS), "--metrics"),
        ]
    else:
        config = folder / "kvferry.yaml"
        entry = {"name": MODEL, "model": str(model), "slots": SLOTS, "ctx": CTX // SLOTS}
        entry |= {"args": ["-t", str(THREADS)], "preload": True}
        config.write_text(
            json.dumps({"listen": f"127.0.0.1:{port}", "servers": {"models": [entry]}})
        )
        program = Path(sys.executable).with_name("kvferry")
        command = [str(program), "serve", "--config", str(config)]
        env["XDG_STATE_HOME"] = str(folder)
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=env)
        try:
            async with asyncio.timeout(_READY_S):
                while not await _is_ready(name, url):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.2)
            yield url
        finally:
            process.terminate()
            await process.wait()


async def _is_ready(name: str, url: str) -> bool:
    """Return whether a contender has loaded its model, and kvferry has probed it."""
    path = "/health" if name == "llama-server" else "/kvferry/state"
    try:
        async with aiohttp.ClientSession() as session, session.get(url + path) as answer:
            told = await answer.json()
    except (aiohttp.ClientError, ValueError):
        return False
    if name == "llama-server":
        return answer.status == 200
    return any(one.get("probed") for one in told["backends"])


async def counters(url: str) -> tuple[float, float]:
    """Return the prompt tokens that the servers computed, and that they had."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    found = dict(re.findall(r"^(llamacpp:\w+) ([\d.e+]+)$", text, re.MULTILINE))
    names = ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total")
    return float(found[names[0]]), float(found[names[1]])


def _prepare(folder: Path, url: str, tok: Path) -> dict[str, str]:
    (folder / "trace.jsonl").write_text(_TRACE * 8)
    filled = {"url": url, "tok": str(tok), "dir": str(folder), "out": str(folder / "out.json"),
              "home": str(folder), "model": MODEL}  # fmt: skip
    (folder / "inference-perf.yaml").write_text(_INFERENCE_PERF.format(**filled))
    from pydoc_data.topics import topics

    book = folder / ".cache" / "llama-benchy" / f"{md5(b'http://127.0.0.1/book').hexdigest()}.txt"
    book.parent.mkdir(parents=True)
    book.write_text("\n".join(topics.values()))
    return filled


async def measured(program: Program, programs: Path, name: str, model: Path, tok: Path) -> Json:
    """Run a program against one contender; return its row."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        async with arm(name, model, folder) as url:
            filled = _prepare(folder, url, tok)
            before = await counters(url)
            command = [word.format(**filled) for word in program.command.split()]
            env = dict(os.environ) | {key: one.format(**filled) for key, one in program.env.items()}
            env["PATH"] = f"{programs}:{env['PATH']}"
            began = perf_counter()
            process = await asyncio.create_subprocess_exec(
                *(str(programs / command[0]), *command[1:]), cwd=folder, env=env,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                async with asyncio.timeout(_PROGRAM_S):
                    said = (await process.communicate())[0].decode(errors="replace")
            except TimeoutError:
                process.kill()
                return {"problem": f"not done after {_PROGRAM_S:g} s"}
            seconds, after = perf_counter() - began, await counters(url)
        text = re.sub(r"\x1b\[[0-9;]*m", "", said)
        try:
            result = program.read(Path(filled["out"]), text)
        except (OSError, ValueError, KeyError, StopIteration, TypeError) as error:
            return {"problem": f"{type(error).__name__}: {error}", "said": text[-2000:]}
    computed, cached = after[0] - before[0], after[1] - before[1]
    return {"own": result.own, "ttft_s": result.ttft_s, "failed": result.failed,
            "computed": computed, "cached": cached, "seconds": seconds}  # fmt: skip


def table(rows: Sequence[tuple[Program, dict[str, Json]]]) -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    yield "| program | its number | llama-server | kvferry | computed tokens | first token, mean |"
    yield "|---|---|---|---|---|---|"
    for program, by_arm in rows:
        alone, ferry = (by_arm[name] for name in _ARMS)
        if problem := alone.get("problem") or ferry.get("problem"):
            yield f"| {program.package.split()[-1]}: {program.name} | {problem} | | | | |"
            continue
        failed = [f" ({one['failed']} failed)" if one["failed"] else "" for one in (alone, ferry)]
        times = " → ".join("-" if t is None else f"{t:.2f} s" for t in
                           (alone["ttft_s"], ferry["ttft_s"]))  # fmt: skip
        yield (
            f"| {program.name} | {program.says} | {alone['own']}{failed[0]} |"
            f" {ferry['own']}{failed[1]} | {alone['computed']:,.0f} → {ferry['computed']:,.0f} |"
            f" {times} |"
        )


async def main(options: argparse.Namespace) -> int:
    """Measure, print the table. Returns 1 if a program could not be measured."""
    model = await small_model(lambda told: print(told, file=sys.stderr))
    tok = VENVS / "tokenizer"
    tokenizer_of(model, tok)
    rows: list[tuple[Program, dict[str, Json]]] = []
    for program in PROGRAMS:
        if options.only and program.name not in options.only:
            continue
        programs = await asyncio.to_thread(install, program)
        if programs is None:
            told = {"problem": f"needs Python {'.'.join(map(str, program.python))}"}
            rows.append((program, dict.fromkeys(_ARMS, told)))
            continue
        found = {name: await measured(program, programs, name, model, tok) for name in _ARMS}
        rows.append((program, found))
        print(program.name, json.dumps(found), file=sys.stderr, flush=True)
    text = "\n".join(table(rows))
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    return int(any("problem" in one for _, found in rows for one in found.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.independent", description=__doc__)
    parser.add_argument("--only", action="append", help="the name of a program; repeatable")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    sys.exit(asyncio.run(main(parser.parse_args())))
