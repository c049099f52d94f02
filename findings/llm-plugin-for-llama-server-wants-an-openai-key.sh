#!/usr/bin/env bash
# The plugin llm-llama-server makes the command-line program `llm` talk to a llama-server at
# localhost:8080, which needs no key. On a machine without an OpenAI key it fails before it
# connects. Its models set a class attribute `key` ("sk-llama-server"), which llm does not read:
# they inherit `needs_key = "openai"` from llm's class for OpenAI chats, and llm asks for that one.
# Who has an OpenAI key does not notice; it is sent to the llama-server as the bearer token, so one
# with --api-key refuses it. Any text as OPENAI_API_KEY helps.
#
# Seen with llm-llama-server 0.2 and llm 0.36 (and with each release from 0.26 on):
#   without a key: Error: No key found - add one using 'llm keys set openai' or set the OPENAI_API_KEY environment variable
#   with any key: Error: Connection error.
# "Connection error." is right here: no server runs.
# Needs: python3 (3.11 to 3.13) with venv and pip, nothing at port 8080. Takes half a minute.
set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
cd "$home"
export LLM_USER_PATH=$home/user HOME=$home
unset OPENAI_API_KEY
python3 -m venv env
env/bin/pip install -qq --disable-pip-version-check 'llm==0.36' 'llm-llama-server==0.2'
said() { { env/bin/llm -m llama-server hello 2>&1 || true; } | grep '^Error' | head -1; }
without=$(said)
with=$(OPENAI_API_KEY=any said)
printf 'without a key: %s\nwith any key: %s\n' "$without" "$with"
[[ $without == *"No key found"* && $with == *"Connection error"* ]]
