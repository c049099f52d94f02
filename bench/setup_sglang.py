"""`python -m bench.setup_sglang`: install sglang-router into a virtual environment, once."""

import subprocess
import sys
import venv

from bench.rig import SGLANG_PACKAGE, sglang_home


def main() -> int:
    """Install sglang-router. The environment can be deleted at any time."""
    home = sglang_home()
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    code = subprocess.run([*pip, SGLANG_PACKAGE]).returncode
    print(f"sglang-router is in {home}" if code == 0 else "pip could not install sglang-router")
    return code


if __name__ == "__main__":
    sys.exit(main())
