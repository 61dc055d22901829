"""Web seeds: plain HTTP(S) servers that hold the untouched files and answer Range requests (BEP 19)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

import httpx

from meshnet.artifact.manifest import Manifest

_TIMEOUT_S = 10.0


def web_seed_url(manifest: Manifest, base: str, file: int) -> str:
    """Where a web seed has one of the files (BEP 19)."""
    directory = f"{manifest.directory}/" if manifest.directory else ""
    return f"{base}{directory}{manifest.file_names[file]}"


async def usable_web_seeds(manifest: Manifest, bases: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Ask each server for one byte of each file: those that are of use now, and what is wrong with the others."""
    distinct = list(dict.fromkeys(bases))
    # As libtorrent does it: without the environment's proxies, and trusting whom the system (or SSL_CERT_FILE) trusts.
    trusted = ssl.create_default_context()
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=True, trust_env=False, verify=trusted) as http:
        problems = await asyncio.gather(*(_problem(http, manifest, base) for base in distinct))
    told = {base: problem for base, problem in zip(distinct, problems, strict=True) if problem}
    return [base for base in distinct if base not in told], told


async def _problem(http: httpx.AsyncClient, manifest: Manifest, base: str) -> str | None:
    for number, record in enumerate(manifest.artifact.files):
        url = web_seed_url(manifest, base, number)
        try:
            # Not read: a server without Range support would send the whole file.
            async with http.stream("GET", url, headers={"range": "bytes=0-0"}) as answer:
                pass
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{url} does not answer ({str(error) or type(error).__name__})"
        if answer.status_code == httpx.codes.OK and record.size_bytes > 1:
            return f"{url} ignores Range requests: a part of the file cannot be had there"
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            return f"{url} answers {answer.status_code} {answer.reason_phrase}"
        size = answer.headers.get("content-range", "").rpartition("/")[2]
        if size.isdecimal() and int(size) != record.size_bytes:
            return f"{url} is another file: it has {size} bytes, not {record.size_bytes}"
    return None
