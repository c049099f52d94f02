"""`python -m tests.fuzz.run ENTRY SECONDS`: look for inputs that an entry cannot take.

Needs atheris (`pip install atheris`). Inputs that reach new code are kept in a folder of the
system's temporary directory; one that fails is written to the corpus, for test_corpus.py.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["router"]):
    from tests.fuzz.targets import ENTRIES

CORPUS = Path(__file__).parent / "corpus"


def main(name: str, seconds: str) -> None:
    """Fuzz one entry; ends the process."""
    found = Path(tempfile.gettempdir()) / f"kvferry-fuzz-{name}"
    found.mkdir(exist_ok=True)
    options = [
        *(f"-max_total_time={seconds}", f"-artifact_prefix={CORPUS / name}/", "-max_len=4096"),
        *("-rss_limit_mb=4096", "-verbosity=0", "-print_final_stats=1"),
    ]
    atheris.Setup([sys.argv[0], *options, str(found), str(CORPUS / name)], ENTRIES[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
