"""Database URLs as people write them, made ready for SQLAlchemy's asynchronous engine."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from meshnet.errors import UsageError

#: What is used where a URL names a database but no driver.
ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}

#: What to install for a driver that is not there.
EXTRAS = {"asyncpg": "pip install 'meshnet[postgres]'", "aiosqlite": "pip install aiosqlite"}


def parse_url(text: str) -> URL:
    """Read a URL; one without a driver gets the asynchronous one.

    Raises:
        UsageError: it is malformed, or of another kind of database than SQLite and PostgreSQL.
    """
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise UsageError(f"cannot use database {text!r}: {error}") from error
    driver = ASYNC_DRIVERS.get(url.drivername, url.drivername)
    if driver not in ASYNC_DRIVERS.values():
        raise UsageError(
            f"cannot use database {shown(url)}: write sqlite:////PATH or postgresql://USER@HOST/NAME "
            f"(drivers: {', '.join(sorted(set(ASYNC_DRIVERS.values())))})"
        )
    if url.port is not None and not 0 < url.port < 65536:
        raise UsageError(f"cannot use database {shown(url)}: port {url.port} is not that of a server")
    url = url.set(drivername=driver)
    sslmode = url.query.get("sslmode")
    if driver == "postgresql+asyncpg" and sslmode is not None:
        # libpq's word, which people copy from elsewhere.
        url = url.difference_update_query(["sslmode"]).update_query_dict({"ssl": sslmode})
    return url


def sqlite_url(path: Path) -> str:
    """The URL of an SQLite file."""
    return URL.create("sqlite+aiosqlite", database=str(path)).render_as_string()


def is_file(url: URL) -> bool:
    """Whether the database is a file of this machine."""
    return url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")


def sqlite_directory(url: str) -> Path | None:
    """Where an SQLite database is; None for one that is not in a file of this machine.

    Raises:
        UsageError: the URL is malformed.
    """
    parsed = parse_url(url)
    if not is_file(parsed):
        return None
    return Path(parsed.database or "").absolute().parent


def shown(url: URL) -> str:
    """For messages: without its password."""
    return url.render_as_string(hide_password=True)


def driver_missing(url: URL, error: ImportError) -> UsageError:
    """What to say when the driver of ``url`` cannot be imported."""
    module = url.get_driver_name()
    return UsageError(f"cannot use database {shown(url)}: {error}; {EXTRAS.get(module, f'install {module}')}")


def create_private_file(url: URL) -> None:
    """Make the file of an SQLite database, if there is none: worker keys will be in it, and nobody else may read them,
    from its first byte on.

    Raises:
        OSError: it cannot be made.
    """
    if not is_file(url):
        return
    path = Path(url.database or "")
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
