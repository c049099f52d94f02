"""A picture and a sound that a probe shows to a server: what follows tells its projector.

llama-server does not say which projector it was started with, and a state with a picture is right
with that one only.
"""

import base64
import io
import math
import struct
import wave

from router.llama.replies import Props
from router.llama.wire import Shown

_SIDE = 64  # pixels: few, so that `--image-min-tokens` shows, and models of small patches are quick
_RATE, _SECONDS = 16_000, 0.5


def media_sample(props: Props) -> Shown | None:
    """Return a prompt with what the server takes of a picture and a sound; None: it takes neither.

    Little text follows: the longer it is, the less is left of what differs.
    """
    media = [_picture()] if props.has_vision else []
    media += [_sound()] if props.has_audio else []
    if not media or not props.media_marker:
        return None
    return Shown(f"{props.media_marker} " * len(media) + "shows", tuple(media))


def _picture() -> str:
    """Return coloured stripes as a portable pixmap, the plainest file that the server reads."""
    pixels = (
        v % 256 for y in range(_SIDE) for x in range(_SIDE) for v in (4 * x, 9 * y, 3 * x * y)
    )
    return base64.b64encode(b"P6 %d %d 255\n" % (_SIDE, _SIDE) + bytes(pixels)).decode()


def _sound() -> str:
    """Return a WAV file with a rising tone."""
    n = int(_RATE * _SECONDS)
    samples = [
        round(20_000 * math.sin(2 * math.pi * (200 + at / 20) * at / _RATE)) for at in range(n)
    ]
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes(struct.pack(f"<{n}h", *samples))
    return base64.b64encode(written.getvalue()).decode()
