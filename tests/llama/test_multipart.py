"""Multipart forms: well-formed and malformed ones."""

import aiohttp
import pytest
from aiohttp import FormData
from hypothesis import given
from hypothesis import strategies as st

from router.llama.multipart import is_array, is_form, text_field
from tests.conftest import StartServer

KIND = "multipart/form-data; boundary=xyz"
FILE = b"RIFF\r\n--xy\r\n\r\n\x00\xff"


def part(head: str, value: str = "tiny", newline: str = "\r\n") -> str:
    return f"--xyz\r\n{head}{newline}{newline}{value}\r\n"


def form(*parts: str) -> bytes:
    return ("".join(parts) + "--xyz--\r\n").encode()


FORMS = [
    "multipart/form-data",
    KIND,
    "multipart/form-data;boundary=xyz",
    "multipart/form-data ; boundary=xyz",
    "multipart/form-data\t; boundary=xyz",
    "multipart/form-data;; boundary=xyz",
    "multipart/form-data; Boundary=xyz",
]
NO_FORMS = [
    "application/json",
    "application/json; multipart/form-data",
    "application/x-www-form-urlencoded",
    "multipart/mixed; boundary=xyz",
    "Multipart/Form-Data; boundary=xyz",
    "multipart/form-datax; boundary=xyz",
    "multipart/form-data boundary=xyz",
    "multipart/form-data, multipart/form-data; boundary=xyz",
    "multipart/form-data\xa0; boundary=xyz",
    ";multipart/form-data; boundary=xyz",
]


DISPOSITION = "Content-Disposition: form-data"
MODEL = part('Content-Disposition: form-data; name="model"')


async def test_as_a_client_writes_it() -> None:
    data = FormData({"prompt": "über", "model": "tiny"}, default_to_multipart=True)
    data.add_field("file", FILE, filename="a.wav")
    written = data()
    raw, kind = await written.as_bytes(), written.headers["content-type"]
    assert is_form(kind)
    assert text_field(raw, kind, "model") == "tiny"
    assert text_field(raw, kind, "prompt") == "über"
    assert text_field(raw, kind, "file") is None


@pytest.mark.parametrize(
    ("raw", "kind", "found"),
    [
        pytest.param(form(MODEL), KIND, "tiny", id="alone"),
        pytest.param(form(MODEL), 'multipart/form-data; boundary="xyz"', "tiny", id="quoted"),
        pytest.param(b"before\r\n" + form(MODEL) + b"after", KIND, "tiny", id="prose around it"),
        pytest.param(
            form(part("content-disposition: form-data; name=model")), KIND, "tiny", id="bare"
        ),
        pytest.param(
            form(part('Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"')),
            *(KIND, "tiny"),
            id="typed",
        ),
        pytest.param(form(MODEL, MODEL), KIND, None, id="twice"),
        pytest.param(
            form(part('Content-Disposition: form-data; name="model"; filename="m"')),
            *(KIND, None),
            id="a file",
        ),
        pytest.param(
            form(part('Content-Disposition: form-data; name="file"', 'name="model"')),
            *(KIND, None),
            id="said in another",
        ),
        pytest.param(form(MODEL), "multipart/form-data", None, id="no boundary"),
        pytest.param(
            form(MODEL), "multipart/form-data; boundary*=punycode''%ff", None, id="odd boundary"
        ),
        pytest.param(
            form(part("Content-Disposition: form-data; filename*=idna''%ff; name=model")),
            *(KIND, None),
            id="odd name",
        ),
        pytest.param(
            form(part('Content-Disposition: form-data; a="' + ";" * 2_000), MODEL),
            *(KIND, "tiny"),
            id="long head elsewhere",
        ),
        pytest.param(
            form(part("Content-Disposition: form-data; name=model; a=" + "b" * 2_000)),
            *(KIND, None),
            id="long head",
        ),
        pytest.param(form(*[part("a: b")] * 300, MODEL), KIND, None, id="many parts"),
        pytest.param(MODEL.encode(), KIND, None, id="cut off"),
        pytest.param(b"", KIND, None, id="empty"),
    ],
)
def test_text_field(raw: bytes, kind: str, found: str | None) -> None:
    assert text_field(raw, kind, "model") == found


@pytest.mark.parametrize(
    ("raw", "kind", "expected"),
    [
        (form(MODEL), KIND, False),
        (form(), KIND, False),
        (form(MODEL, MODEL), KIND, True),
        (form(*[part("a: b")] * 300), KIND, True),
        (form(MODEL), "multipart/form-data", True),
        (form(MODEL), "multipart/form-data; Boundary=abc; boundary=xyz", True),
        (form(MODEL, part(f"{DISPOSITION}; Name=x; name=model")), KIND, True),
        (form(MODEL, part(f"{DISPOSITION}; name=x\r\n{DISPOSITION}; name=model")), KIND, True),
        (form(MODEL, part(f'{DISPOSITION}; name=model; filename=""')), KIND, True),
    ],
    ids=[
        *("once", "not at all", "twice", "many parts", "no boundary", "two boundaries"),
        *("two names", "two heads", "a file without a name"),
    ],
)
def test_is_array(raw: bytes, kind: str, expected: bool) -> None:
    assert is_array(raw, kind, "model") is expected


async def test_the_server_takes_the_same_for_a_form(llama_server: StartServer) -> None:
    """llama-server refuses a form with 400 here and answers a JSON body.

    A JSON body taken for a form would pass unread, with its `lora` and `id_slot`.
    """
    server = await llama_server(slots=1)
    raw, found = b'{"prompt": [5, 6, 7], "n_predict": 1}', dict[str, bool]()
    async with aiohttp.ClientSession() as session:
        for kind in FORMS + NO_FORMS:
            headers = {"Content-Type": kind}
            async with session.post(f"{server.url}/completion", data=raw, headers=headers) as told:
                found[kind] = {200: False, 400: True}[told.status]
    assert found == dict.fromkeys(FORMS, True) | dict.fromkeys(NO_FORMS, False)
    assert {kind: is_form(kind) for kind in found} == found


@given(
    st.lists(
        st.sampled_from([b"--xyz", b"\r\n", b"name=", b'"model"', b"Content-Disposition:"])
        | st.binary(max_size=5)
    ),
    st.sampled_from([KIND, "boundary=\udcff", "x; boundary*=q'q'%ff", "\0;;=;boundary"]),
)
def test_nothing_is_raised(parts: list[bytes], kind: str) -> None:
    text_field(b"".join(parts), kind, "model")
