"""A server of S3's protocol for tests: moto's, in a process of its own, with buckets that no other test knows."""

import os
import re
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.until import until

MISSING = "moto_server is missing: make .venv/dev installs it"


@dataclass(frozen=True)
class ObjectStore:
    url: str

    @property
    def variables(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "a secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def new_bucket(self) -> str:
        """s3://…: one that pyarrow has not seen in this process."""
        bucket = f"bucket-{secrets.token_hex(6)}"
        self._ask(bucket, "PUT")
        return f"s3://{bucket}"

    def unfinished(self, bucket: str) -> int:
        """Uploads that have begun and are neither finished nor given up."""
        return self._ask(f"{bucket.removeprefix('s3://')}?uploads").count(b"<Upload>")

    def keys(self, bucket: str) -> list[str]:
        return re.findall("<Key>(.*?)</Key>", self._ask(bucket.removeprefix("s3://")).decode())

    def _ask(self, path: str, method: str = "GET", contents: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.url}/{path}", contents, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())


@contextmanager
def object_store(log: Path, **variables: str) -> Iterator[ObjectStore]:
    """A server on a port of its own; what it prints, a line per request among it, goes to `log`."""
    program = Path(sys.executable).with_name("moto_server")  # not one of another version elsewhere
    if not program.exists():
        pytest.skip(MISSING)
    with log.open("w") as out:
        command = [str(program), "-H", "127.0.0.1", "-p", "0"]
        server = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **variables})
    try:
        yield ObjectStore(_address(server, log))
    finally:
        server.kill()
        server.wait()


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    found: list[str] = []

    def known() -> bool:
        assert server.poll() is None, log.read_text()
        found[:] = re.findall(r"Running on (http://127\.0\.0\.1:\d+)", log.read_text())
        return bool(found)

    until(known, "the start of moto's server")
    return found[0]
