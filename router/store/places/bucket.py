"""A bucket of S3 or its like, by obstore, which gives up the interpreter's lock."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from configparser import ConfigParser, Error
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from router.base.errors import KvError, KvFileError
from router.store.files import SMALL_BYTES
from router.store.places.place import CHUNK, Entry, MissingError, Progress

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

log = structlog.get_logger(__name__)

_SILENT = timedelta(seconds=10)  # of a store that was asked for something
_LONGEST = timedelta(seconds=110)  # of one request: less than a thread may take (io_pool.py)
# Of an upload, which says nothing until it has arrived: 5 MiB is the least that S3 takes of one in
# parts, and comes within _LONGEST at 50 kB/s, one after the other.
_PART_BYTES = 5 << 20
_URL = re.compile("https?://[^/]")
_NESTED = re.compile(r"^\s*endpoint_url\s*=\s*(\S+)", re.MULTILINE)
_ELSEWHERE = {"role_arn", "credential_process", "sso_session", "sso_start_url"}
_METADATA = "169.254.169.254"
_CONNECT = timedelta(seconds=5)
_PAGE = 1000  # names; S3 lists and deletes so many at once


class Bucket:
    """The objects of one bucket, below a prefix. Implements `place.Place`."""

    def __init__(self, url: str, endpoint: str | None = None, region: str | None = None) -> None:
        """Look at nothing yet but the environment, for the keys.

        `url`: `s3://BUCKET/PREFIX` and the like. `endpoint`: of a store that is not the usual one,
        such as http://127.0.0.1:9000. Raises KvError for a place that cannot be,
        ModuleNotFoundError without obstore.
        """
        import obstore

        self._obstore = obstore
        self.url = url
        with _told(url):
            is_s3 = url.startswith("s3:")
            profile = _profile() if is_s3 else {}
            # None: Amazon's, or no S3.
            self.endpoint = endpoint or (_endpoint_of(profile) if is_s3 else None)
            config = _config_of(region, self.endpoint, profile)
            singly = config.copy()
            singly["disable_bulk_delete"] = True
            self._store = self._opened(config, {"read_timeout": _SILENT})
            self._uploads = self._opened(config, {})
            self._singly = self._opened(singly, {"read_timeout": _SILENT})
        self._deletes_singly = False

    def _opened(self, config: "S3Config", more: "ClientConfig") -> "ObjectStore":
        from obstore.store import S3Store, from_url

        client: ClientConfig = {
            "connect_timeout": _CONNECT,
            "timeout": _LONGEST,
            "allow_http": self.endpoint is not None and self.endpoint.startswith("http:"),
            **more,
        }
        retries: RetryConfig = {"max_retries": 1, "retry_timeout": _SILENT}
        url = self.url
        if not url.startswith("s3:"):
            return from_url(url, client_options=client, retry_config=retries)
        return S3Store.from_url(url, config=config, client_options=client, retry_config=retries)

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Write an object, whole or not at all."""
        with _told(name):
            self._obstore.put(
                self._uploads,
                name,
                content,
                use_multipart=len(content) > _PART_BYTES,
                chunk_size=_PART_BYTES,
                max_concurrency=1,
            )

    def head(self, name: str) -> Entry | None:
        """Return what is known of an object. None: it is not there."""
        with suppress(MissingError), _told(name, may_miss=True):
            found = self._obstore.head(self._store, name)
            return Entry(found["path"], found["size"], found["last_modified"].timestamp())
        return None

    def get(self, name: str) -> bytes:
        """Return the content of a small object. Raises MissingError."""
        with _told(name, may_miss=True):
            found = self._obstore.get(self._store, name)
            if found.meta["size"] > SMALL_BYTES:
                raise KvFileError(f"{name} is too large")
            return bytes(found.bytes())

    def read(self, name: str, into: memoryview, progress: Progress) -> None:
        """Read an object of just this size. Raises MissingError, KvFileError."""
        done = 0
        with _told(name, may_miss=True):
            for chunk in self._obstore.get(self._store, name).stream(min_chunk_size=CHUNK):
                if done + len(chunk) > len(into):
                    raise KvFileError(f"{name} is larger than its name says")
                into[done : done + len(chunk)] = chunk
                progress(len(chunk))
                done += len(chunk)
        if done != len(into):
            raise KvFileError(f"{name} is smaller than its name says")

    def listing(self, prefix: str) -> list[Entry]:
        """Return all objects whose names begin with `prefix`."""
        with _told(f"the listing of {prefix}"):
            pages = self._obstore.list(self._store, prefix, chunk_size=_PAGE)
            return [
                Entry(one["path"], one["size"], one["last_modified"].timestamp())
                for page in pages
                for one in page
            ]

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, those that are there."""
        for start in range(0, len(names), _PAGE):
            self._delete(names[start : start + _PAGE])

    def _delete(self, names: Sequence[str]) -> None:
        with _told(names[0]):
            if not self._deletes_singly:
                try:
                    self._obstore.delete(self._store, names)
                    return
                except Exception:  # noqa: BLE001 - a store may not know `?delete`
                    log.info("bucket_deletes_one_by_one", url=self.url)
            try:
                self._obstore.delete(self._singly, names)
            except FileNotFoundError:  # one of them: the rest may be there
                for name in names:
                    with suppress(FileNotFoundError):
                        self._obstore.delete(self._singly, name)
            self._deletes_singly = True


@contextmanager
def _told(what: str, *, may_miss: bool = False) -> Iterator[None]:
    """Raise what obstore raises as one of our errors. `may_miss`: the object may not be there."""
    try:
        yield
    except KvError:
        raise
    except Exception as error:
        if may_miss and isinstance(error, FileNotFoundError):
            raise MissingError(f"{what} is missing") from error
        raise KvError(f"{what}: {_first_line(error)}") from error
    except BaseException as error:  # a panic of its Rust code is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise KvError(f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    if _METADATA in str(error):  # where a machine of Amazon's has the keys of its role
        return (
            "there are no keys: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE;"
            " for gs:// GOOGLE_APPLICATION_CREDENTIALS"
        )
    if "NoSuchBucket" in str(error):
        return "there is no such bucket: create it, or correct the URL"
    return lines[0] if lines and lines[0] else type(error).__name__


def _endpoint_of(profile: Mapping[str, str]) -> str | None:
    """Return the URL of the S3, from where other programs take it."""
    named = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    found = next(filter(None, named), None) or profile.get("endpoint_url")
    if found and not _URL.match(found):
        raise KvError(f"AWS_ENDPOINT_URL: {found} must begin with http:// or https://")
    return found


def _profile() -> Mapping[str, str]:
    """Return what the user's files of AWS say of the profile in use. Blocks; raises KvError."""
    wanted = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    name, found = wanted or "default", dict[str, str]()
    for variable, default, sections in (
        ("AWS_CONFIG_FILE", "config", (f"profile {name}", name)),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", (name,)),
    ):
        path = Path(os.environ.get(variable) or Path.home() / ".aws" / default).expanduser()
        parser = ConfigParser(interpolation=None)
        try:
            with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
                parser.read_file(file)
        except (Error, OSError, UnicodeDecodeError) as error:
            raise KvError(f"{path} cannot be read: {_first_line(error)}") from error
        for section in filter(parser.has_section, sections):
            found |= dict(parser[section])
        services = parser.get(f"services {found.get('services')}", "s3", fallback="")
        if nested := _NESTED.search(services):  # it wins over that of the profile
            found["endpoint_url"] = nested[1]
    if wanted and not found:
        raise KvError(f"AWS_PROFILE: there is no profile {name!r}")
    if wanted and (how := sorted(_ELSEWHERE & found.keys())):
        raise KvError(
            f"the profile {name!r} has {how[0]}, which is not followed here: start kvferry with"
            " the output of `aws configure export-credentials --format env`"
        )
    return found


def _config_of(region: str | None, endpoint: str | None, profile: Mapping[str, str]) -> "S3Config":
    """Return what obstore does not find by itself."""
    config: S3Config = {}
    if endpoint is not None:  # in both places: what is in the environment would win
        config["endpoint"] = os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
    named = (region, *(os.environ.get(f"AWS_{key}REGION") for key in ("", "DEFAULT_")))
    if at := next(filter(None, named), None) or profile.get("region"):
        config["region"] = at
    if "AWS_ACCESS_KEY_ID" not in os.environ and "aws_access_key_id" in profile:
        config["access_key_id"] = profile["aws_access_key_id"]
        config["secret_access_key"] = profile.get("aws_secret_access_key", "")
        if token := profile.get("aws_session_token"):
            config["session_token"] = token
    return config
