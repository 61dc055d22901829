"""The API key and the join token of this machine's mesh: from the environment, else from a private file in the store.

The file is made by the first `meshnet serve`; other commands on the same machine read it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshnet.artifact.store import store_root
from meshnet.errors import UsageError

API_KEY_ENVIRONMENT = "MESHNET_API_KEY"
JOIN_TOKEN_ENVIRONMENT = "MESHNET_JOIN_TOKEN"


@dataclass(frozen=True)
class Secret:
    """A key or token and where it comes from (for people)."""

    value: str
    origin: str


def new_api_key() -> str:
    return f"sk-meshnet-{secrets.token_urlsafe(24)}"


def new_join_token() -> str:
    return f"join-{secrets.token_urlsafe(24)}"


def api_key(given: str | None = None, *, create: bool = False) -> Secret:
    """The key for the API: ``given``, else the environment, else the file (made if ``create``).

    Raises:
        UsageError: there is none, or it is malformed, or the file can be read by others.
        StoreError: the file is needed and there is no usable store.
    """
    return _find(given, "--api-key", API_KEY_ENVIRONMENT, "api_key", "API key", create)


def join_token(given: str | None = None, *, create: bool = False) -> Secret:
    """The token for the tracker, found like `api_key`.

    Raises:
        UsageError: as `api_key`.
        StoreError: as `api_key`.
    """
    return _find(given, "--join-token", JOIN_TOKEN_ENVIRONMENT, "join_token", "join token", create)


def _find(given: str | None, option: str, environment: str, field: str, what: str, create: bool) -> Secret:
    if given:
        return Secret(_checked(given, option), option)
    from_environment = os.environ.get(environment, "").strip()
    if from_environment:
        return Secret(_checked(from_environment, environment), environment)
    path = store_root() / "credentials.json"
    stored = _read(path)
    if stored is None and create:
        _make(path)
        stored = _read(path)
    if stored is None:
        raise UsageError(
            f"no {what}: pass {option}, set {environment}, or run `meshnet serve` on this machine first "
            f"(looked in {path})"
        )
    value = stored.get(field)
    if not isinstance(value, str):
        raise UsageError(f"{path} holds no {field}; delete it and start `meshnet serve` to make a new one")
    return Secret(_checked(value, str(path)), str(path))


def _checked(value: str, origin: str) -> str:
    if not re.fullmatch(r"[!-~]{8,200}", value):
        raise UsageError(f"the secret from {origin} must be 8 to 200 printable ASCII characters without spaces")
    return value


def _read(path: Path) -> dict[str, object] | None:
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o077:
                raise UsageError(f"{path} can be read by others; run `chmod 600 {path}`, or delete it for new secrets")
            value = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is damaged; delete it and start `meshnet serve` to make a new one")
    return value


def _make(path: Path) -> None:
    # Written aside (with mode 0600) and linked: whole or not at all, and never over a file that just appeared.
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
            json.dump({"api_key": new_api_key(), "join_token": new_join_token()}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
            os.link(file.name, path)
    except FileExistsError:
        return
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
