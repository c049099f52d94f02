"""`python -m tests.tools.man_page`: write docs/kvferry.1 from the parser of the command."""

import os
import sys

from argparse_manpage.manpage import Manpage

from router import __version__
from router.tools.cli import command_parser
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "kvferry.1"


def man_page() -> str:
    """Return the man page."""
    os.environ["COLUMNS"] = "100"  # the width at which argparse wraps
    about = {
        "date": "2026",
        "project_name": "kvferry",
        "version": __version__,
        "manual_title": "kvferry manual",
    }
    parser = command_parser()
    vars(parser)["man_short_description"] = "move KV state files between the slots of llama-servers"
    return f"{Manpage(parser, about)}\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(man_page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE} is written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
