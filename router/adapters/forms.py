"""Text fields of a `multipart/form-data` body, read as llama-server reads them: those without a
file name, and one that is given twice is no text (`server_http_context::post`, server-http.cpp).
"""

from email.message import Message
from email.parser import BytesHeaderParser

_FORM = "multipart/form-data"


def is_form(content_type: str) -> bool:
    """As the server's parser tells, which looks at the case."""
    return content_type.startswith(_FORM)


def text_field(form: bytes, content_type: str, name: str) -> str | None:
    """The field `name` of a form; None if it has none, or cannot be read. Raises nothing."""
    kind = Message()
    kind["Content-Type"] = content_type
    boundary = kind.get_boundary()
    if not boundary:
        return None
    # Before the first boundary and behind the last there is no field.
    line = b"\r\n--" + boundary.encode(errors="surrogateescape")
    parts = (b"\r\n" + form).split(line)[1:-1]
    found = [value for part in parts if (value := _value(part, name)) is not None]
    return found[0].decode(errors="replace") if len(found) == 1 else None


def _value(part: bytes, name: str) -> bytes | None:
    """What is in a part, if it is the text field `name`."""
    head, _, value = part.partition(b"\r\n\r\n")
    fields = BytesHeaderParser().parsebytes(head.removeprefix(b"\r\n"))
    named = fields.get_param("name", header="content-disposition") == name
    return value if named and fields.get_filename() is None else None
