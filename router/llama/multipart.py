"""Text fields of a `multipart/form-data` body: the model of a request with sound, and no more.

A text field has no file name and is given once (`server_http_context::post`, server-http.cpp).
"""

import re

_FORM = "multipart/form-data"
_LOOKED_AT = 64 * 1024  # bytes of either end: clients write the model before or behind the sound
_FIELD = rb'\r\n(?i:content-disposition): *form-data; *name="?%s"?\r\n(?:[^\r\n]+\r\n)*\r\n'


def is_form(content_type: str) -> bool:
    """Return whether the server takes a body for a form (httplib.cpp, extract_media_type).

    The server compares the whole media type, case included, without the blanks around it. A type
    that only begins like a form is JSON to the server, so its form fields must not count here.
    """
    return content_type.partition(";")[0].strip(" \t") == _FORM


def text_field(form: bytes, name: str) -> str | None:
    """Return the field `name` of a form, or None if it is not there once. Never raises."""
    ends = form if len(form) <= 2 * _LOOKED_AT else form[:_LOOKED_AT] + form[-_LOOKED_AT:]
    found = re.findall(_FIELD % re.escape(name.encode()) + rb"([^\r\n]*)\r\n--", ends)
    return found[0].decode(errors="replace") if len(found) == 1 else None


def is_array(form: bytes, name: str) -> bool:
    """Return whether the field `name` is given twice, or may be.

    The server parses the head of a part in its own way, but the name is in the head verbatim.
    """
    return form.count(b'"' + name.encode() + b'"') + form.count(b"=" + name.encode()) > 1
