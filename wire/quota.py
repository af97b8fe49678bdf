"""A bound on what strangers may make this program hold together, first come first served."""

from __future__ import annotations

from collections.abc import Callable


class Share:
    """One part of a quota: asked for, and granted once `go` is called.

    Attributes:
        size: how much.
        go: to be called when it is granted.
    """

    __slots__ = ("_quota", "go", "size")

    def __init__(self, quota: Quota, size: int, go: Callable[[], None]) -> None:
        self.size = size
        self.go = go
        self._quota = quota

    def give_back(self) -> None:
        """It is not needed any more, or never will be; harmless when repeated."""
        self._quota.take_back(self)


class Quota:
    """Hands out shares in the order in which they were asked for, none past another.

    Every share that fits when it stands alone gets its turn, however many smaller ones come.

    Attributes:
        free: what is left of the limit.
    """

    def __init__(self, limit: int) -> None:
        self.free = limit
        self._line: dict[Share, None] = {}
        self._granted: set[Share] = set()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line)

    def ask(self, size: int, go: Callable[[], None]) -> Share:
        """Stand in line; `go` is called when it is granted, perhaps before this returns."""
        share = Share(self, size, go)
        self._line[share] = None
        self._serve()
        return share

    def take_back(self, share: Share) -> None:
        """See `Share.give_back`."""
        if share in self._granted:
            self._granted.remove(share)
            self.free += share.size
        else:
            self._line.pop(share, None)
        self._serve()

    def _serve(self) -> None:
        while self._line:
            share = next(iter(self._line))
            if share.size > self.free:
                return
            del self._line[share]
            self._granted.add(share)
            self.free -= share.size
            share.go()
