"""Open doors: each is said at the start, by `kvferry check` and by `kvferry doctor`."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from router.config.open_doors import open_doors
from router.config.schema import parse
from router.tools.doctor.check import check_text
from router.tools.doctor.together import of_several
from tests.support.servers.running_router import running

UNUSED_URL = "http://127.0.0.1:9"
PLAIN = f"backends: [{{name: a, url: '{UNUSED_URL}'}}]\n"
KEYED = f"backends: [{{name: a, url: '{UNUSED_URL}', api_key_env: KVFERRY_TEST_DOOR}}]\n"
KEYS = f"auth: {{keys: [{{name: x, hash: 'sha256:{'0' * 64}'}}]}}\n"
OWN_KEY, BEYOND = "sends its own (api_key_env) to a", "clients of other machines need no key"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLAIN, []),
        (KEYED, [OWN_KEY]),
        (PLAIN + "listen: 0.0.0.0:8080\n", [BEYOND]),
        (PLAIN + "listen: '[::]:8080'\n", [BEYOND]),
        (PLAIN + "listen: gpu-box:8080\n", [BEYOND]),
        (PLAIN + "listen: '[::1]:8080'\n", []),
        (PLAIN + "listen: 127.0.0.2:8080\n", []),
        (PLAIN + "listen: localhost:8080\n", []),
        (KEYED + "listen: 0.0.0.0:8080\n", [OWN_KEY, BEYOND]),
        (KEYED + "listen: 0.0.0.0:8080\n" + KEYS, []),
    ],
)
def test_what_is_open(text: str, said: list[str], tmp_path: Path) -> None:
    file = tmp_path / "kvferry.yaml"
    file.write_text(text)
    config = parse(text, "test")

    doors = list(open_doors(config))
    assert [words in door.what for words, door in zip(said, doors, strict=True)] == [True] * len(
        said
    )
    checked = check_text(file)[1]
    by_doctor = [finding for finding in of_several([], config) if "need no key" in finding.what]
    assert [door.what in checked for door in doors] == [True] * len(doors)
    assert checked.count("need no key") == len(by_doctor) == len(doors)
    assert all("kvferry key NAME" in finding.do for finding in by_doctor)


async def test_the_log_of_the_start_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_TEST_DOOR", "secret")
    with capture_logs() as lines:
        async with running([], None, yaml=KEYED, wait_for=[]):
            pass
    (line,) = [line for line in lines if line["event"] == "open_door"]
    assert OWN_KEY in line["what"]
    assert line["log_level"] == "warning"
