"""Shares of a quota: never more than there is, in order, nobody forgotten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from wire.quota import Quota, Share

LIMIT = 10


@given(st.lists(st.tuples(st.booleans(), st.integers(1, LIMIT), st.integers(0, 100)), max_size=60))
@settings(max_examples=100)
def test_shares_are_granted_in_order_and_within_the_limit(
    steps: list[tuple[bool, int, int]],
) -> None:
    quota = Quota(LIMIT)
    asked: list[Share] = []
    granted: list[int] = []
    given_back: set[int] = set()

    def check() -> None:
        held = [number for number in granted if number not in given_back]
        assert quota.free == LIMIT - sum(asked[number].size for number in held)
        assert quota.free >= 0
        assert granted == sorted(granted)
        waiting = [n for n in range(len(asked)) if n not in granted and n not in given_back]
        assert len(quota) == len(waiting)
        assert not waiting or asked[waiting[0]].size > quota.free

    for ask, size, which in steps:
        if ask or not asked:
            number = len(asked)
            asked.append(Share(quota, size, lambda: None))  # its number must be known to `go`
            asked[number] = quota.ask(size, lambda number=number: granted.append(number))
        else:
            number = which % len(asked)
            given_back.add(number)
            asked[number].give_back()
        check()
    for number, share in enumerate(asked):
        given_back.add(number)
        share.give_back()
    assert (quota.free, len(quota)) == (LIMIT, 0)
