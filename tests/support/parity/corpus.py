"""Request bodies for llama-server's routes: every field, with good, edge and wrong values.

Field names: `make_llama_cmpl_schema` (server-schema.cpp), and those that the routes read besides
(server-common.cpp, server-chat.cpp, server-context.cpp), of llama.cpp b11434. Data only.
"""

from typing import Any

import orjson

Json = dict[str, Any]

# No reuse: numbers depend on how a prompt is split into batches.
GREEDY: Json = {"temperature": 0, "seed": 7, "cache_prompt": False}
USER: Json = {"role": "user", "content": "hi there"}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "does f",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}

# A valid body for each route, to which one field is added.
BASES: dict[str, Json] = {
    "/completion": {"prompt": "hi there", "n_predict": 2, **GREEDY},
    "/completions": {"prompt": "hi there", "n_predict": 2, **GREEDY},
    "/v1/completions": {"prompt": "hi there", "max_tokens": 2, **GREEDY},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2, **GREEDY},
    "/v1/messages": {"messages": [USER], "max_tokens": 2, "temperature": 0},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses": {"input": "hi there", "max_output_tokens": 2, **GREEDY},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 2, **GREEDY},
    "/apply-template": {"messages": [USER]},
    "/v1/chat/completions/input_tokens": {"messages": [USER]},
    "/v1/responses/input_tokens": {"input": "hi there"},
}

# Field to values, for fields that every completion route reads or ignores.
SAMPLING: dict[str, list[object]] = {
    "temperature": [0, 0.7, 5, -1, "warm", None],
    "dynatemp_range": [0, 0.5, -1, "x"],
    "dynatemp_exponent": [1, 0, "x"],
    "top_k": [0, 1, 40, -1, 2.9, 10**9, "x"],
    "top_p": [0, 0.5, 1, 2, -1, "x", None],
    "min_p": [0, 0.05, 1, 2, "x"],
    "top_n_sigma": [-1, 1, "x"],
    "typical_p": [1, 0.5, 0, "x"],
    "xtc_probability": [0, 0.5, 2, "x"],
    "xtc_threshold": [0.1, 0.6, -1, "x"],
    "repeat_last_n": [0, 64, -1, "x"],
    "repeat_penalty": [1, 1.1, 0, "x"],
    "frequency_penalty": [0, 0.5, -2, "x"],
    "presence_penalty": [0, 0.5, -2, "x"],
    "dry_multiplier": [0, 0.8, "x"],
    "dry_base": [1.75, 0.5, "x"],
    "dry_allowed_length": [2, 0, -1, "x"],
    "dry_penalty_last_n": [0, 64, -1, "x"],
    "dry_sequence_breakers": [["\n"], [], "x", [1]],
    "mirostat": [0, 1, 2, 3, "x"],
    "mirostat_tau": [5, 0, "x"],
    "mirostat_eta": [0.1, 0, "x"],
    "adaptive_target": [-1, 0.5, 2, "x"],
    "adaptive_decay": [0.9, 0, 2, "x"],
    "seed": [0, 42, 2**31, "x"],
    "min_keep": [0, 5, -1, "x"],
    "ignore_eos": [True, False, "x", 1],
    "logit_bias": [
        [],
        [[5, 1.0]],
        [[5, False]],
        [["the", -1]],
        [[5]],
        {"5": 1.0},
        {"the": False},
        {"5": "x"},
        "x",
        7,
    ],
    "samplers": [["top_k", "temperature"], [], "kt", ["nonsense"], [1], 7],
    "backend_sampling": [False, "x"],
}
OUTPUT: dict[str, list[object]] = {
    "n_predict": [-1, 0, 1, 2, -2, 1.9, True, "x", None],
    "n_indent": [0, 2, -1, "x"],
    "n_keep": [0, -1, 4, -2, "x"],
    "n_discard": [0, 2, -1, "x"],
    "n_cache_reuse": [0, 4, -1, "x"],
    "t_max_predict_ms": [-1, 0, 1000, -2, "x"],
    "stop": [[], ["e"], "e", "", ["e", ""], [1], 7, None],
    "n_probs": [0, 1, 3, 1000, -1, "x"],
    "logprobs": [0, 2, True, False, "x"],
    "top_logprobs": [0, 2, -1, "x"],
    "post_sampling_probs": [True, "x"],
    "return_tokens": [True, False, "x", 1],
    "return_progress": [True, "x"],
    "timings_per_token": [True, "x"],
    "verbose": [False, "x"],
    "response_fields": [["content"], ["generation_settings/n_predict"], ["none"], [], "x", [1]],
    "sse_ping_interval": [-1, 1, -2, "x"],
    "stream": [True, False, None, "x", 1, "true"],
    "stream_options": [{"include_usage": True}, {}, {"include_usage": "x"}, "x", None],
    "n": [1, 2, 0, 3, -1, "x"],
    "n_cmpl": [1, 2, 0, "x"],
    "id_slot": [-1, 0, 1, 7, "x", None, 0.5],
    "cache_prompt": [True, False, "x", None],
    "lora": [[], [{"id": 0, "scale": 1}], [{"id": 0}], {}, "x", None, [7]],
    "grammar": ["", 'root ::= "a"', "root ::= nothing", "::", 7],
    "json_schema": [{}, SCHEMA, {"type": "nonsense"}, "x", 7],
    "grammar_lazy": [False, True, "x"],
    "grammar_triggers": [[], [{"type": 1, "value": "a"}], "x", [7]],
    "preserved_tokens": [[], ["<|im_end|>"], [7], "x"],
    "max_tokens": [0, 1, -1, -2, "x", None],
    "max_completion_tokens": [0, 1, -1, "x", None],
    "echo": [True, False, "x"],
    "suffix": ["b", "", 7, None],
    "best_of": [1, 2, "x"],
    "user": ["somebody", 7],
    "model": ["any name will do", "", 7, None],
    "store": [True],
    "metadata": [{"a": "b"}],
    "unknown_field": [1, {"deep": [1, 2]}],
    "speculative.n_max": [4, "x"],
    "reasoning_budget_tokens": [-1, 0, 8, -2, "x"],
    "reasoning_budget_message": ["enough", 7],
    "reasoning_budget_start_tag": ["<think>", 7],
    "reasoning_budget_end_tag": ["</think>", 7],
    "reasoning_budget_end_tags": [["</think>"], "x", [7]],
    "reasoning_control": [False, "x"],
    "continue_final_message": [False, True, "x"],
    "generation_prompt": ["", 7],
    "chat_format": [0, "x"],
    "chat_parser": ["", "x", 7],
    "parse_tool_calls": [True, "x"],
}
CHATTING: dict[str, list[object]] = {
    "messages": [
        [{"role": "system", "content": "s"}, USER],
        [USER, {"role": "assistant", "content": "a"}],
        [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "nonsense"}]}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": 7, "content": "x"}],
        [{"content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        [],
        ["x"],
        {},
        "x",
        7,
        None,
    ],
    "tools": [[TOOL], [], [{}], [{"type": "function"}], "x", None, {}],
    "tool_choice": ["auto", "none", "required", "nonsense", 7, {"type": "function"}],
    "parallel_tool_calls": [True, False, "x"],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        {"type": "nonsense"},
        {},
        "x",
    ],
    "reasoning_format": ["none", "auto", "deepseek", "deepseek-legacy", "nonsense", 7],
    "reasoning_effort": ["low", 7],
    "enable_thinking": [True, False, "x"],
    "thinking_budget_tokens": [0, 8, "x"],
    "chat_template_kwargs": [{"a": "b"}, {"enable_thinking": False}, {}, "x", {"a": 7}],
    "add_generation_prompt": [True, False, "x"],
    "prefill_assistant": [True, "x"],
    "functions": [[], "x"],
    "function_call": ["auto"],
}
PROMPTS: list[object] = [
    "",
    "x " * 30,
    "€ \u0000 \U0001f600",
    [1, 2, 3],
    [1, "and", 2],
    ["one"],
    ["one", "two"],
    [[1, 2], "two", [3, "mixed"]],
    [[1, 2], [3]],
    [],
    [[]],
    [-1],
    [100_000],
    [2**40],
    [1.5],
    [None],
    7,
    None,
    True,
    {},
    {"prompt_string": "hi"},
    {"prompt_string": 7},
    {"prompt_string": "hi", "multimodal_data": []},
    {"prompt_string": "hi", "multimodal_data": ["AAAA"]},
    [{"prompt_string": "hi"}, "two"],
]

MESSAGES: list[Json] = [
    {"system": "be kind"},
    {"system": [{"type": "text", "text": "be kind"}]},
    {"system": 7},
    {"stop_sequences": ["e"]},
    {"stop_sequences": "e"},
    {"top_k": 3, "top_p": 0.5},
    {"metadata": {"user_id": "u"}},
    {"thinking": {"type": "enabled", "budget_tokens": 8}},
    {"thinking": "x"},
    {"tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]},
    {"tools": [{"name": "f"}]},
    {"tools": "x"},
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "auto"}},
    {"tool_choice": "x"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
    {"max_tokens": "x"},
    {"max_tokens": None},
    {"id_slot": 1, "n": 2, "cache_prompt": False},
]

RESPONSES: list[Json] = [
    {"input": [{"role": "user", "content": "hi"}]},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
    {"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]},
    {"input": [{"type": "nonsense"}]},
    {"input": []},
    {"input": 7},
    {"input": None},
    {"instructions": "be kind"},
    {"instructions": 7},
    {"previous_response_id": "resp_1"},
    {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
    {"tools": [{"type": "web_search"}]},
    {"tools": "x"},
    {"reasoning": {"effort": "low"}},
    {"text": {"format": {"type": "text"}}},
    {"max_output_tokens": 0},
    {"max_output_tokens": "x"},
    {"truncation": "auto"},
]

INFILL: list[Json] = [
    {"prompt": "c"},
    {"input_extra": [{"filename": "f", "text": "t"}]},
    {"input_extra": "x"},
    {"input_extra": [{}]},
    {"input_prefix": 7},
    {"input_suffix": None},
]

# Whole bodies.
BODIES: dict[str, list[Json]] = {
    "/completion": [BASES["/completion"] | {"prompt": prompt} for prompt in PROMPTS],
    "/v1/completions": [BASES["/v1/completions"] | {"prompt": prompt} for prompt in PROMPTS],
    "/v1/messages": [BASES["/v1/messages"] | more for more in MESSAGES],
    "/v1/responses": [BASES["/v1/responses"] | more for more in RESPONSES],
    "/infill": [BASES["/infill"] | more for more in INFILL],
    "/tokenize": [
        {"content": "a b"},
        {"content": ""},
        {"content": ["a", 7]},
        {"content": [1]},
        {"content": []},
        {"content": 5},
        {"content": None},
        {"content": "a", "add_special": True},
        {"content": "a", "add_special": "x"},
        {"content": "<|im_end|>", "parse_special": False},
        {"content": "a b", "with_pieces": True},
        {"content": "€", "with_pieces": "x"},
        {},
    ],
    "/detokenize": [
        {"tokens": [1, 2]},
        {"tokens": []},
        {"tokens": [-1]},
        {"tokens": [100_000]},
        {"tokens": ["x"]},
        {"tokens": "x"},
        {"tokens": None},
        {},
    ],
    "/embedding": [{"content": "a"}, {"content": ["a", "b"]}, {"content": [1, 2]}, {}],
    "/embeddings": [{"content": "a"}, {"input": "a"}, {"content": 7}, {}],
    "/v1/embeddings": [
        {"input": "a"},
        {"input": ["a", "b"]},
        {"input": [1, 2]},
        {"input": [[1, 2], [3]]},
        {"input": ""},
        {"input": []},
        {"input": 7},
        {"input": "a", "encoding_format": "base64"},
        {"input": "a", "encoding_format": "nonsense"},
        {"input": "a", "embd_normalize": -1},
        {"input": "a", "dimensions": 4},
        {},
    ],
    "/rerank": [
        {"query": "a", "documents": ["b", "c"]},
        {"query": "a", "documents": []},
        {"query": "a", "documents": ["b"], "top_n": 1},
        {"query": "a", "documents": ["b"], "top_n": "x"},
        {"query": 7, "documents": ["b"]},
        {"query": "a", "texts": ["b"]},
        {"query": "a"},
        {},
    ],
    "/v1/rerank": [{"query": "a", "documents": ["b"]}, {}],
    "/reranking": [{"query": "a", "documents": ["b"]}, {}],
    "/v1/systemone": [{"prompt": "a"}, {}],
}

# Bodies that are no JSON object. On completion routes the router itself refuses them.
NO_OBJECT: list[bytes] = [
    b"",
    b" ",
    b"{",
    b"{bad",
    b"[]",
    b"null",
    b"7",
    b'"x"',
    b"true",
    b"[" * 5000,
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a",}',
    b'{"prompt": "a"} x',
    b'{"prompt": "a" /* why */}',
]

# Form bodies, as fields in order. The server takes every value as a string, so only a grammar makes
# an answer end and repeat.
_A = ("grammar", 'root ::= "a"')
FORMS: list[list[tuple[str, str]]] = [
    [],
    [("prompt", "hi"), ("input", "hi"), _A],
    [("prompt", "one"), ("prompt", "two"), _A],
    [("prompt", "hi"), _A, ("model", "any"), ("id_slot", "1"), ("stream", "true")],
    [("prompt", "hi"), ("n_predict", "2")],
    [("prompt", "hi"), ("input_prefix", "a"), ("input_suffix", "b"), ("input", "hi"), ("n", "2")],
    [("messages", '[{"role": "user", "content": "hi"}]'), ("max_tokens", "2")],
    [("messages", "one"), ("messages", "two"), ("n_predict", "2")],
]

# Bodies that are JSON objects, but look odd.
_COLD = b'"temperature": 0, "cache_prompt": false'
_BOM = b"\xef\xbb\xbf"


def deep(path: str) -> list[bytes]:
    """Return bodies that are nested deeper than orjson writes (254 levels), for any route.

    Also with a byte order mark, which the server skips.
    """
    base = orjson.dumps(BASES[path])[:-1]
    found = []
    for n in (300, 900):
        nested = b"[" * n + b"]" * n
        more = [b'"x": %b', b'"x": {"y": %b}, "id_slot": 0', b'"x": %b, "cache_prompt": true']
        if "messages" in BASES[path]:
            parts = b'[{"role": "user", "content": [{"type": "text", "text": "a"}]}]'
            more += [b'"messages": ' + parts + b', "x": %b']
        found += [base + b", " + each % nested + b"}" for each in more]
    return [*found, _BOM + base + b"}", _BOM + found[0]]


ODD: list[bytes] = [
    b"{}",
    b'\xef\xbb\xbf {"prompt": "a", "n_predict": 1, %b}' % _COLD,
    b'{"prompt": "a", "n_predict": 1, "n_predict": 2, %b}' % _COLD,
    b'{"prompt": "a", "n_predict": 99999999999999999999999, %b}' % _COLD,
    b'{"prompt": "a", "n_predict": 1, "seed": 18446744073709551615, %b}' % _COLD,
    b'{"prompt": "a\\u0000b", "n_predict": 1, %b}' % _COLD,
    b'{"id_slot": 1, "prompt": "a", "id_slot": 0, "n_predict": 1, %b}' % _COLD,
    b'{"prompt": "a", "n_predict": 1, "deep": %b%b, %b}' % (b"[" * 900, b"]" * 900, _COLD),
]
