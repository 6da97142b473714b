"""What receive_weights gives to a rollout adapter."""

from __future__ import annotations

from typing import Any, AsyncIterator, Awaitable, Callable, Iterator

from weightwire.verl.receiver import Version


class Weights:
    """The tensors of a round. verl's adapters iterate: they have told their engine already that weights come, so that after a round that
    failed they get the version before once more. Ours asks for the version first, and tells its engine nothing when none came."""

    def __init__(self, receive: Callable[[], Awaitable[Version | None]], served: Callable[[], Version],
                 named: Callable[[Version], Iterator[tuple[str, Any]]], acknowledge: Callable[[Version], Awaitable[None]],
                 deadline: float):
        self._receive, self._served, self._named, self._acknowledge = receive, served, named, acknowledge
        self.deadline = deadline  #: seconds

    async def version(self) -> Version | None:
        """The round's, complete and verified; None: the round failed."""
        return await self._receive()

    def named(self, version: Version) -> list[tuple[str, Any]]:
        """Read-only views, all of them."""
        return list(self._named(version))

    async def installed(self, version: Version) -> None:
        await self._acknowledge(version)

    async def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        version = await self._receive() or self._served()
        for named in self._named(version):
            yield named
        await self._acknowledge(version)
