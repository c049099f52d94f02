"""Text fields of a `multipart/form-data` body, read as llama-server reads them.

A text field has no file name and is given once (`server_http_context::post`, server-http.cpp).
"""

from email.message import Message
from email.parser import BytesHeaderParser

_FORM = "multipart/form-data"
# Python's parser takes time quadratic in a head's length, and 10 to 40 µs for each part.
_LONG_HEAD, _MOST_PARTS = 1024, 256


def is_form(content_type: str) -> bool:
    """Return whether the server takes a body for a form (httplib.cpp, extract_media_type).

    The server compares the whole media type, case included, without the blanks around it. A type
    that only begins like a form is JSON to the server, so its form fields must not count here.
    """
    return content_type.partition(";")[0].strip(" \t") == _FORM


def text_field(form: bytes, content_type: str, name: str) -> str | None:
    """Return the field `name` of a form, or None if it is missing or unreadable. Never raises."""
    values = (_value(part, name) for part in _parts(form, content_type) or ())
    found = [value for value in values if value is not None]
    return found[0].decode(errors="replace") if len(found) == 1 else None


def is_array(form: bytes, content_type: str, name: str) -> bool:
    """Return whether the field `name` is given twice, or may be.

    The server parses the head of a part in its own way, but the name is in the head verbatim.
    """
    parts = _parts(form, content_type)
    heads = [part.partition(b"\r\n\r\n")[0] for part in parts or ()]
    return parts is None or sum(name.encode() in head for head in heads) > 1


def _parts(form: bytes, content_type: str) -> list[bytes] | None:
    """Return the parts between the boundaries; None if they cannot be read."""
    boundary = _boundary(content_type)
    if boundary is None:
        return None
    # There is no field before the first boundary or after the last.
    parts = (b"\r\n" + form).split(b"\r\n--" + boundary, _MOST_PARTS)
    return parts[1:-1] if len(parts) <= _MOST_PARTS else None


def _boundary(content_type: str) -> bytes | None:
    if len(content_type) > _LONG_HEAD:
        return None
    kind = Message()
    try:
        kind["Content-Type"] = content_type
        named = [field for field, _ in kind.get_params([]) if field.lower() == "boundary"]
        boundary = kind.get_boundary() if named == ["boundary"] else None
        return boundary.encode(errors="surrogateescape") if boundary else None
    except ValueError:  # a parameter may name an unknown encoding
        return None


def _value(part: bytes, name: str) -> bytes | None:
    """Return the content of a part if it is the text field `name`, else None."""
    head, _, value = part.partition(b"\r\n\r\n")
    if len(head) > _LONG_HEAD:
        return None
    fields = BytesHeaderParser().parsebytes(head.removeprefix(b"\r\n"))
    try:
        named = fields.get_param("name", header="content-disposition") == name
        return value if named and fields.get_filename() is None else None
    except ValueError:
        return None
