"""`python -m bench.setup_rivals NAME...`: install other routers, each into its own environment."""

import argparse
import subprocess
import sys
import venv

from bench.rivals import PACKAGES, home_of


def main() -> int:
    """Install the named routers. The environments can be deleted at any time."""
    parser = argparse.ArgumentParser(prog="bench.setup_rivals", description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(PACKAGES), metavar="NAME")
    for name in parser.parse_args().names:
        home = home_of(name)
        venv.create(home, with_pip=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
        if code := subprocess.run([*pip, PACKAGES[name]]).returncode:
            print(f"pip could not install {name}")
            return code
        print(f"{name} is in {home}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
