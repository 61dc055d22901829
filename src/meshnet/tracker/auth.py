"""Bearer tokens, compared in constant time."""

from __future__ import annotations

import secrets


def bearer_is(authorization: str | None, token: str) -> bool:
    """True if the ``Authorization`` header's value carries exactly ``token``. An empty token never matches."""
    scheme, _, given = (authorization or "").partition(" ")
    # As bytes: compare_digest refuses text that is not ASCII, and a header may hold anything.
    same = secrets.compare_digest(given.strip().encode(), token.encode())
    return same and scheme.lower() == "bearer" and bool(token)
