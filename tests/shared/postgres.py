"""A PostgreSQL server of the distribution, of its own for the tests."""

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class PostgreSQL:
    """A server that listens at a port of this machine."""

    port: int
    user: str
    bin: Path
    folder: Path

    def new_database(self) -> str:
        """The URL of a new database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        where = ("-h", "localhost", "-p", str(self.port))
        _as_user(self.user, str(self.bin / "createdb"), *where, name)
        return f"postgresql+psycopg://{self.user}@localhost:{self.port}/{name}"

    def restart(self) -> None:
        """Stop it at once, and start it again."""
        for how in (("-m", "immediate", "stop"), ("-w", "start")):
            log = ("-l", str(self.folder / "log"))
            _as_user(self.user, str(self.bin / "pg_ctl"), "-D", str(self.folder / "data"), *log,
                     "-o", f"-p {self.port} -k {self.folder}", *how)  # fmt: skip


def _as_user(user: str, *command: str) -> None:
    """PostgreSQL does not run as root."""
    given = ["runuser", "-u", user, "--", *command] if os.geteuid() == 0 else list(command)
    subprocess.run(given, check=True, capture_output=True, cwd="/")


@contextmanager
def postgres_server() -> Iterator[PostgreSQL]:
    """A server in a folder of its own; skips where there is none."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL is not installed")
    folder, user = Path(tempfile.mkdtemp()), "postgres" if os.geteuid() == 0 else getpass.getuser()
    if os.geteuid() == 0:
        shutil.chown(folder, user)
    folder.chmod(0o755)
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    server = PostgreSQL(port, user, found[-1].parent, folder)
    data = str(folder / "data")
    _as_user(user, str(server.bin / "initdb"), "-D", data, "-A", "trust", "-U", user, "--no-sync")
    log = str(folder / "log")
    control = (str(server.bin / "pg_ctl"), "-D", data, "-l", log)
    _as_user(user, *control, "-o", f"-p {port} -k {folder}", "-w", "start")
    try:
        yield server
    finally:
        _as_user(user, *control, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)
