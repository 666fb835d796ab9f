"""What the scheduler believes the store to hold."""

from __future__ import annotations

from vllm_gaudi_ucm.connector.lookup import SAVE_SECONDS, KnownKeys


def test_the_oldest_are_forgotten() -> None:
    known = KnownKeys(most=2)
    known.sent([b"a", b"b"])
    known.found([b"a", b"c"])
    assert (b"a" in known, b"b" in known, b"c" in known, len(known)) == (True, False, True, 2)
    known.clear()
    assert len(known) == 0


def test_a_miss_forgets_what_is_not_on_its_way() -> None:
    """A look-up may be older than the save that it does not see."""
    now = 0.0
    known = KnownKeys(clock=lambda: now)
    known.sent([b"old"])
    now = SAVE_SECONDS
    known.sent([b"new"])
    known.missed([b"old", b"new", b"never"])
    assert (b"old" in known, b"new" in known) == (False, True)
    known.discard([b"new"])
    assert b"new" not in known


def test_what_was_found_is_not_on_its_way() -> None:
    known = KnownKeys(clock=lambda: 0.0)
    known.sent([b"a", b"b"])
    known.found([b"b", b"c"])
    assert [known.is_in_transit(key) for key in (b"a", b"b", b"c", b"d")] == [True, False, False, False]
    known.missed([b"a", b"b"])
    assert (b"a" in known, b"b" in known) == (True, False)
