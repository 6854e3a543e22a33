"""A local web server for download tests: ranges, validators, and connections that break where a test says."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Resource:
    """``data`` under a validator; ``break_after`` lists how many bytes each of the next responses sends before the connection dies."""

    data: bytes
    etag: str = '"v1"'
    break_after: list[int] = field(default_factory=list)
    ranges: bool = True
    status: int = 200


@dataclass
class Server:
    url: str
    resources: dict[str, Resource]
    requests: list[tuple[str, str | None]]  # (path, Range header)


@contextlib.contextmanager
def serve(resources: dict[str, Resource]) -> Iterator[Server]:
    requests: list[tuple[str, str | None]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            requests.append((self.path, wanted))
            resource = resources.get(self.path)
            if resource is None or resource.status != 200:
                self.send_error(404 if resource is None else resource.status)
                return
            start = 0
            if wanted and resource.ranges and self.headers.get("If-Range") == resource.etag:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                if start >= len(resource.data):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(resource.data)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(resource.data) - 1}/{len(resource.data)}")
            else:
                self.send_response(200)
            body = resource.data[start:]
            self.send_header("Content-Length", str(len(body)))
            if resource.etag:
                self.send_header("ETag", resource.etag)
            self.end_headers()
            if resource.break_after:
                self.wfile.write(body[: resource.break_after.pop(0)])
                self.wfile.flush()
                self.close_connection = True
                return
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_address[1]}", resources, requests)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
