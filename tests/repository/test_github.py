"""GitHub's own files: valid by its schemas, which check-jsonschema brings along."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

GITHUB = ROOT / ".github"
KINDS = {
    "github-workflows": sorted(GITHUB.glob("workflows/*.yml")),
    "github-issue-forms": sorted(GITHUB.glob("ISSUE_TEMPLATE/[!c]*.yml")),
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_valid(kind: str) -> None:
    assert KINDS[kind]
    command = ("-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}")
    done = subprocess.run(
        [sys.executable, *command, *KINDS[kind]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_jobs_end_and_may_only_read() -> None:
    for path in KINDS["github-workflows"]:
        text = path.read_text()
        assert text.count("timeout-minutes:") == text.count("runs-on:")
        assert "permissions:\n  contents: read\n" in text
        assert text.count("persist-credentials: false") == text.count("actions/checkout@")
