"""The store: the one directory under which model files and what is derived from them are kept.

``MESHNET_STORE`` names it. Without that it is ``/var/lib/meshnet`` where this user can write there, else
``/var/tmp/meshnet-<uid>``. Home directories are refused: they are often small, backed up or on the network, and
models are tens of gigabytes. ``MESHNET_STORE_MOUNT`` names a drive that must be mounted and hold the store, so that
models do not fill the system's own disk when the drive is missing.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path, PurePosixPath

from meshnet.artifact import mounts
from meshnet.errors import StoreError

ENVIRONMENT = "MESHNET_STORE"
MOUNT_ENVIRONMENT = "MESHNET_STORE_MOUNT"
SYSTEM_ROOT = Path("/var/lib/meshnet")
SHARED_TEMP = Path("/var/tmp")

#: Left free on a disk, so that a download does not starve everything else on the machine.
RESERVE_BYTES = 64 << 20

_ADVICE = f"set {ENVIRONMENT} to a directory on a disk with room for models, for example /srv/meshnet"


def store_root() -> Path:
    """The store's directory: absolute, free of symlinks, created if missing, writable.

    Raises:
        StoreError: it resolves under /home, its drive is not mounted, it cannot be created or written, or belongs to
            someone else.
    """
    configured = os.environ.get(ENVIRONMENT, "").strip()
    if configured:
        root = _resolve(Path(configured))
        _refuse_home(root, configured)
        _require_drive(root)
        problem = _make_writable(root)
        if problem:
            raise StoreError(f"the store {root} cannot be used ({problem}); {_ADVICE}")
        return root
    root = _resolve(SYSTEM_ROOT)
    _require_drive(root)
    if not _is_under_home(root) and _make_writable(root) is None:
        return root
    return _private_temp_root()


def models_dir() -> Path:
    """``<store>/models``, created if missing.

    Raises:
        StoreError: as ``store_root``.
    """
    return _subdirectory("models")


def cache_dir() -> Path:
    """``<store>/cache``, created if missing: everything in it can be deleted at any time.

    Raises:
        StoreError: as ``store_root``.
    """
    return _subdirectory("cache")


def ensure_space(path: Path, need_bytes: int, *, underway: bool = False) -> None:
    """Check that ``need_bytes`` more can be written at ``path`` (which need not exist yet).

    While they are ``underway``, others may have taken some of what is left free.

    Raises:
        StoreError: the file system is too full; the message has what is needed, free and kept in reserve.
    """
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    reserve_bytes = RESERVE_BYTES // 2 if underway else RESERVE_BYTES
    if free_bytes < need_bytes + reserve_bytes:
        raise StoreError(
            f"not enough disk space at {existing}: {need_bytes / 1e6:.0f} MB are needed and "
            f"{free_bytes / 1e6:.0f} MB are free, but {reserve_bytes / 1e6:.0f} MB of the disk are kept in reserve for "
            f"everything else on the machine; free some, or {_ADVICE}"
        )


def _subdirectory(name: str) -> Path:
    directory = store_root() / name
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(f"{directory} cannot be created ({error.strerror}); {_ADVICE}") from error
    return directory


def _resolve(path: Path) -> Path:
    # Follows links in the part that exists and dangling links too; the rest is kept as it is.
    return Path(os.path.realpath(path.expanduser()))


def _refuse_home(root: Path, configured: str) -> None:
    if _is_under_home(root):
        shown = configured if configured == str(root) else f"{configured} (which is {root})"
        raise StoreError(f"the store {shown} is under /home, where models must not be kept; {_ADVICE}")


def _require_drive(root: Path) -> None:
    configured = os.environ.get(MOUNT_ENVIRONMENT, "").strip()
    if not configured:
        return
    drive = _resolve(Path(configured))
    if not mounts.is_mounted(PurePosixPath(drive)):
        raise StoreError(
            f"no drive is mounted at {configured} ({MOUNT_ENVIRONMENT}), where the store must be: mount it, "
            "or change the setting; nothing was created"
        )
    if not root.is_relative_to(drive):
        raise StoreError(
            f"the store {root} is not on the drive that it must be on, {configured} ({MOUNT_ENVIRONMENT}); "
            f"set {ENVIRONMENT} to a directory there"
        )


def _is_under_home(path: Path) -> bool:
    homes = {PurePosixPath("/home"), PurePosixPath(os.path.realpath("/home"))}
    here = PurePosixPath(path)
    places = [here, *mounts.other_places(here, mounts.read_mounts())]
    return any(place.is_relative_to(home) for place in places for home in homes)


def _make_writable(root: Path) -> str | None:
    """Create ``root`` if needed; what is wrong with it, or None."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if not os.access(root, os.W_OK | os.X_OK):
        return "not writable by this user"
    return None


def _private_temp_root() -> Path:
    # /var/tmp is open to everyone: take the directory only if it is ours, or another user could swap models.
    root = _resolve(SHARED_TEMP) / f"meshnet-{os.getuid()}"
    _require_drive(root)
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise StoreError(f"the store {root} cannot be created ({error.strerror}); {_ADVICE}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise StoreError(f"the store {root} belongs to another user or is not a directory; {_ADVICE}")
    if not os.access(root, os.W_OK | os.X_OK):
        raise StoreError(f"the store {root} is not writable by this user; {_ADVICE}")
    _refuse_home(root, str(root))
    return root
