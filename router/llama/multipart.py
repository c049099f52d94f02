"""Text fields of a `multipart/form-data` body, read as llama-server reads them: those without a
file name, and one that is given twice is no text (`server_http_context::post`, server-http.cpp).
"""

from email.message import Message
from email.parser import BytesHeaderParser

_FORM = "multipart/form-data"
# Python's parser takes time by the square of a head's length, and 10 to 40 µs for each part.
_LONG_HEAD, _MOST_PARTS = 1024, 256


def is_form(content_type: str) -> bool:
    """As the server's parser tells (httplib.cpp, extract_media_type): the whole media type, in its
    case, without the blanks around it. What only begins like a form is JSON to the server, and its
    fields would be read by nobody here."""
    return content_type.partition(";")[0].strip(" \t") == _FORM


def text_field(form: bytes, content_type: str, name: str) -> str | None:
    """The field `name` of a form; None if it has none, or cannot be read. Raises nothing."""
    found = _values(form, content_type, name)
    return found[0].decode(errors="replace") if found and len(found) == 1 else None


def is_array(form: bytes, content_type: str, name: str) -> bool:
    """Whether the field `name` is given twice, or may be: the server reads the head of a part in
    its own way, but what it takes for a name is in there as it is."""
    parts = _parts(form, content_type)
    heads = [part.partition(b"\r\n\r\n")[0] for part in parts or ()]
    return parts is None or sum(name.encode() in head for head in heads) > 1


def _values(form: bytes, content_type: str, name: str) -> list[bytes] | None:
    """What the text fields `name` hold; None if that cannot be told."""
    parts = _parts(form, content_type)
    if parts is None:
        return None
    return [value for part in parts if (value := _value(part, name)) is not None]


def _parts(form: bytes, content_type: str) -> list[bytes] | None:
    """None if that cannot be told."""
    boundary = _boundary(content_type)
    if boundary is None:
        return None
    # Before the first boundary and behind the last there is no field.
    parts = (b"\r\n" + form).split(b"\r\n--" + boundary, _MOST_PARTS)
    if len(parts) > _MOST_PARTS:
        return None
    return parts[1:-1]


def _boundary(content_type: str) -> bytes | None:
    if len(content_type) > _LONG_HEAD:
        return None
    kind = Message()
    try:
        kind["Content-Type"] = content_type
        named = [field for field, _ in kind.get_params([]) if field.lower() == "boundary"]
        boundary = kind.get_boundary() if named == ["boundary"] else None
        return boundary.encode(errors="surrogateescape") if boundary else None
    except ValueError:  # encodings, of which a parameter may name one
        return None


def _value(part: bytes, name: str) -> bytes | None:
    """What is in a part, if it is the text field `name`."""
    head, _, value = part.partition(b"\r\n\r\n")
    if len(head) > _LONG_HEAD:
        return None
    fields = BytesHeaderParser().parsebytes(head.removeprefix(b"\r\n"))
    try:
        named = fields.get_param("name", header="content-disposition") == name
        return value if named and fields.get_filename() is None else None
    except ValueError:
        return None
