"""Who may do what: one master key, and for each rollout a key that reaches nothing but that rollout."""

from __future__ import annotations

import hmac


def rollout_key(master: str, rollout_id: str) -> str:
    """The key of one rollout: HMAC-SHA256 of its id under the master key, in hex."""
    return hmac.digest(master.encode(), b"rollout\0" + rollout_id.encode(), "sha256").hex()


def permitted(given: str | None, master: str, rollout_id: str | None) -> bool:
    """True for the master key, and for the rollout's own key where the route belongs to a rollout (else None).

    Comparisons take the same time wherever the keys differ.
    """
    if given is None:
        return False
    offered = given.encode("utf-8", "surrogateescape")
    if hmac.compare_digest(offered, master.encode()):
        return True
    return rollout_id is not None and hmac.compare_digest(offered, rollout_key(master, rollout_id).encode())
