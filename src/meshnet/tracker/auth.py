"""Bearer tokens, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac


def bearer_is(authorization: str | None, token: str) -> bool:
    """True if the ``Authorization`` header's value carries exactly ``token``. An empty token never matches."""
    scheme, _, given = (authorization or "").partition(" ")
    # Digests are of one length, so that comparing them takes the same time whatever is wrong.
    same = hmac.compare_digest(_digest(given.strip()), _digest(token))
    return same and scheme.lower() == "bearer" and bool(token)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
