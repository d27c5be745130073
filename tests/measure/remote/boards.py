"""Boards for tests: an OpenSSH server on the loopback interface, and agents that are started without ssh."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ecc.measure.remote.target import Target

SOURCE = Path(__file__).resolve().parents[3] / "src"


@dataclass(frozen=True, kw_only=True)
class LocalBoard(Target):
    """An agent in a process of this machine: the same program and the same pipes, without ssh between them."""

    wrapper: tuple[str, ...] = ()
    """Command before Python."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Python with the sources of this tree, and nothing else of the environment."""
        return ["env", f"PYTHONPATH={SOURCE}", *self.wrapper, sys.executable, *arguments]


def local_board(**options: object) -> LocalBoard:
    settings: dict[str, object] = {"host": "local", "hang_seconds": 5.0, "retry_seconds": 20.0}
    return LocalBoard(**(settings | options))  # type: ignore[arg-type]


def find_sshd() -> str | None:
    """The server, which must be started by its absolute path."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def can_start_sshd() -> bool:
    """Whether there is a server, and this user may start it."""
    return find_sshd() is not None and hasattr(os, "geteuid") and os.geteuid() == 0


@contextmanager
def ssh_server(folder: Path) -> Iterator[tuple[str, str]]:
    """An OpenSSH server with its own keys, on a free port of the loopback interface.

    Yields:
        The address as a target, and the ssh command to use, for ECC_SSH.
    """
    server = find_sshd()
    assert server is not None
    folder.chmod(0o700)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=30)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "authorized").chmod(0o600)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = Path(sys.executable)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"PidFile {folder}/pid\nPasswordAuthentication no\nUsePAM no\nStrictModes no\nPermitRootLogin yes\n"
        f'SetEnv "PYTHONPATH={SOURCE}"\nMaxStartups 100\n'
    )
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/user\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known\nStrictHostKeyChecking no\n"
        "LogLevel ERROR\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([server, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    try:
        until = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()  # noqa: PT018
                time.sleep(0.05)
        yield f"ssh://127.0.0.1:{port}?python={python}", f"ssh -F {folder}/ssh_config"
    finally:
        process.terminate()
        process.wait(timeout=10)
