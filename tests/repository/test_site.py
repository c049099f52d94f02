"""The documentation builds as a site, and nothing in it is fetched from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

SETUP = ROOT / "deploy" / "site" / "mkdocs.yml"
_FETCHED = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"')


def test_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    argv = ["-m", "mkdocs", "build", "--strict", "-f", str(SETUP), "-d", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run([sys.executable, *argv], env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page.relative_to(tmp_path).as_posix(): page for page in tmp_path.rglob("*.html")}
    assert {"index.html", "operating.html", "adr/0001-imports.html"} <= pages.keys()
    for page in pages.values():
        assert _FETCHED.findall(page.read_text()) == []
