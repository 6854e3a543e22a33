"""Resumable HTTP downloads.

The bytes arrive in ``NAME.part``; ``NAME.part.json`` remembers which version of the resource they belong to (URL, ETag, modification
date). An interrupted transfer continues with a Range request guarded by If-Range, so that a resource that changed meanwhile starts from
zero instead of being stitched together. ``NAME`` itself appears only when length and digest are right.
"""

from __future__ import annotations

import errno
import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from ggufc import __version__
from ggufc.errors import DriverError
from ggufc.files import CHUNK, Progress, require_space, sha256_file

TIMEOUT_SECONDS = 60
PAUSES_SECONDS = (0.5, 2.0, 5.0, 10.0)
"""Waits before the second, third, ... attempt; attempts that made progress start over at the first."""


@dataclass(frozen=True)
class Part:
    """The incomplete file and what it is a part of."""

    path: Path
    url: str

    @property
    def note(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    def validator(self) -> str:
        """The ETag or date under which the present bytes were sent, empty when they must not be continued."""
        try:
            note = json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""
        if not isinstance(note, dict) or note.get("url") != self.url or not self.path.is_file():
            return ""
        validator = note.get("validator", "")
        return validator if isinstance(validator, str) else ""

    def remember(self, validator: str) -> None:
        self.note.write_text(json.dumps({"url": self.url, "validator": validator}), encoding="utf-8")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


def _split(url: str) -> urllib.parse.SplitResult:
    try:
        return urllib.parse.urlsplit(url)
    except ValueError as error:
        raise DriverError(f"{url} is not an address ({error})") from None


def file_name(url: str) -> str:
    """The last path component of a URL, as a plain file name."""
    name = urllib.parse.unquote(_split(url).path.rsplit("/", 1)[-1])
    if not name or name in {".", ".."} or "/" in name or "\\" in name or "\0" in name:
        raise DriverError(f"{url} does not end in a file name; give one with -o")
    return name


def download(
    url: str, output: Path, *, sha256: str = "", progress: Progress | None = None, pauses: tuple[float, ...] = PAUSES_SECONDS
) -> Path:
    """Fetch ``url`` into ``output``, continuing an earlier attempt where possible.

    A file that is already there is left alone: it is the result when its digest is ``sha256`` (or none was asked for), and an error
    otherwise. Raises ``DriverError`` with the URL and the way out.
    """
    scheme = _split(url).scheme
    if scheme not in {"http", "https"}:
        raise DriverError(f"{url}: only http and https addresses can be downloaded")
    sha256 = check_digest_text(sha256)
    if output.exists():
        if sha256 and sha256_file(output, progress) != sha256:
            raise DriverError(f"{output} exists and is not the file asked for (its SHA-256 differs); move it away or choose another -o")
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    part = Part(output.with_name(output.name + ".part"), url)
    failures = 0
    while True:
        before = part.size()
        try:
            _attempt(part, output.name, progress)
            break
        except urllib.error.HTTPError as error:
            if error.code not in {408, 429, 500, 502, 503, 504} or failures >= len(pauses):
                raise DriverError(f"{url}: the server answered {error.code} {error.reason}") from error
        except (http.client.HTTPException, urllib.error.URLError, ConnectionError, TimeoutError) as error:
            if part.size() > before:
                failures = 0
            if failures >= len(pauses):
                reason = getattr(error, "reason", None) or error
                kept = f"; {part.path} keeps {part.size()} bytes, run the same command to continue" if part.size() else ""
                raise DriverError(f"{url}: the connection failed ({reason}){kept}") from error
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                part.discard()
                raise DriverError(f"{output}: the disk is full; the incomplete download was removed") from error
            raise
        time.sleep(pauses[failures])
        failures += 1
    if sha256:
        found = sha256_file(part.path, progress)
        if found != sha256:
            part.discard()
            raise DriverError(f"{url}: the SHA-256 is {found}, not {sha256}; the download was removed")
    part.path.replace(output)
    part.note.unlink(missing_ok=True)
    return output


def check_digest_text(text: str) -> str:
    """Normalise a SHA-256 given by the user; empty stays empty."""
    text = text.strip().lower().removeprefix("sha256:")
    if text and not re.fullmatch(r"[0-9a-f]{64}", text):
        raise DriverError(f"{text!r} is not a SHA-256: 64 hexadecimal digits are expected")
    return text


def _attempt(part: Part, what: str, progress: Progress | None) -> None:
    """One request; returns when the part is complete, raises when the connection breaks."""
    validator = part.validator()
    start = part.size() if validator else 0
    request = urllib.request.Request(part.url, headers={"User-Agent": f"ggufc/{__version__}", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
        request.add_header("If-Range", validator)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and _total(error.headers.get("Content-Range", "")) == start:
            return  # everything had arrived; only the rename was missing
        if error.code == 416:
            part.discard()
            raise ConnectionError("the server has fewer bytes than were already received") from error
        raise
    with response:
        resumed = response.status == 206
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            part.discard()
            raise ConnectionError(f"the server continued at another byte than {start}")
        if not resumed:
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length and length.isdigit() else 0
        etag = response.headers.get("ETag", "")
        # A weak ETag does not promise equal bytes and must not be used with If-Range (RFC 9110, 13.1.5).
        part.remember(etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", ""))
        require_space(part.path.parent, total - start, what)
        done = start
        with part.path.open("ab" if resumed else "wb") as stream:
            while piece := response.read1(CHUNK):
                stream.write(piece)
                done += len(piece)
                if progress:
                    progress(what, done, total)
        if total and done < total:
            raise ConnectionError(f"{done} of {total} bytes arrived")


def _total(content_range: str) -> int:
    match = re.fullmatch(r"bytes \*/(\d+)", content_range)
    return int(match[1]) if match else -1
