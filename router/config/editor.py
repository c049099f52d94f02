"""The JSON Schema of the configuration, for editors: `kvferry schema`.

The file is made from `schema.py` and the reference by `python -m tests.config.editor_schema`.
"""

import sys
from pathlib import Path

PATH = Path(__file__).with_name("kvferry.schema.json")


def print_schema() -> int:
    """Print the schema. Returns 0."""
    sys.stdout.write(PATH.read_text(encoding="utf-8"))
    return 0
