"""Addresses of boards: `ssh://user@host:port`, and the ssh command that runs Python there."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ecc.errors import EccError

SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
"""No questions, and a dead connection is noticed within 15 seconds."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where to measure: `ssh://user@host:port?python=/path/python3&dir=/path`."""

    host: str
    user: str | None = None
    port: int | None = None
    python: str = "python3"
    """Python on the board."""
    dir: str | None = None
    """Working directory on the board, for tasks in files."""
    hang_seconds: float = 20.0
    """A board that is silent for this long is given up."""
    retry_seconds: float = 180.0
    """How long to try to connect again after the link was lost; a reboot takes a minute or two."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse a URL."""
        hint = "give ssh://user@host[:port]"
        try:
            url = urlsplit(text)
            port = url.port
        except ValueError as error:
            raise EccError(f"target {text!r} is not valid ({error}); {hint}.") from None
        if url.scheme != "ssh" or not url.hostname or url.path not in ("", "/") or url.password is not None:
            raise EccError(f"target {text!r} is not valid; {hint}, without a password: ssh uses your keys.")
        if url.hostname.startswith("-") or (url.username or "").startswith("-"):
            raise EccError(f"target {text!r} is not valid: a name must not start with a dash.")
        given = dict(parse_qsl(url.query, keep_blank_values=True))
        options: dict[str, Any] = {}
        for name, value in given.items():
            if name in ("python", "dir"):
                options[name] = value
            elif name in ("hang_seconds", "retry_seconds"):
                try:
                    options[name] = float(value)
                except ValueError:
                    raise EccError(f"target {text!r}: {name} is {value!r}; give a number.") from None
                if not (math.isfinite(options[name]) and options[name] > 0):
                    raise EccError(f"target {text!r}: {name} is {value}; give a number of seconds above 0.")
            else:
                known = "python, dir, hang_seconds and retry_seconds"
                raise EccError(f"target {text!r}: option {name!r} is unknown; options are {known}.")
        user = None if url.username is None else unquote(url.username)
        return cls(host=url.hostname, user=user, port=port, **options)

    def __str__(self) -> str:
        user = "" if self.user is None else f"{self.user}@"
        return f"ssh://{user}{self.host}{'' if self.port is None else f':{self.port}'}"

    @property
    def version_command(self) -> str:
        """What a user can type to see whether the board can be used."""
        port = "" if self.port is None else f"-p {self.port} "
        user = "" if self.user is None else f"{self.user}@"
        return f"ssh {port}{user}{self.host} {shlex.quote(self.python)} --version"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The ssh command that runs Python with these arguments on the board.

        The environment variable ECC_SSH replaces `ssh`, for example `ssh -F my_config`.
        """
        remote = " ".join(["exec", *map(shlex.quote, [self.python, *arguments])])
        if self.dir is not None:
            remote = f"cd {shlex.quote(self.dir)} && {remote}"
        command = shlex.split(os.environ.get("ECC_SSH", "ssh"))
        for one in SSH_OPTIONS:
            command += ["-o", one]
        if self.port is not None:
            command += ["-p", str(self.port)]
        if self.user is not None:
            command += ["-l", self.user]
        return [*command, "-T", "--", self.host, remote]
