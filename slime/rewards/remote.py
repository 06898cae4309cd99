"""A reward model behind an HTTP address.

Tests hold: transient faults are retried until the time is over, a 4xx is raised at once, and the wait for
one of the connections is not counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

import aiohttp

from slime.errors import ConfigError, EngineError
from slime.rewards.grade import RewardTimeoutError
from slime.types import Sample

logger = logging.getLogger(__name__)

_MAX_BODY_CHARS = 500
_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 30.0


class RemoteReward:
    """Client of ``--rm-url``.

    Args:
        url: Where ``{prompt, response, label}`` is posted; the JSON answer is the reward.
        timeout_seconds: Bound of one reward, all tries and pauses included, from its first try.
        num_connections: Rewards that are asked for at a time.
    """

    def __init__(self, url: str | None, *, timeout_seconds: float, num_connections: int = 64) -> None:
        if not url:
            raise ConfigError("--rm-type remote_rm needs the address of the reward model: give --rm-url URL")
        self._url = url
        self._timeout_seconds = timeout_seconds
        self._num_connections = num_connections
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(num_connections)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(self, sample: Sample, response: str) -> Any:
        """The remote reward of one response.

        Raises:
            EngineError: The server refuses the request, or cannot be reached or fails all the time.
            RewardTimeoutError: The server does not answer in time.
        """
        session = await self._open()
        payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
        async with self._places:
            give_up_at = time.monotonic() + self._timeout_seconds
            pause = _FIRST_PAUSE_SECONDS
            while True:
                try:
                    return await self._post(session, payload, give_up_at - time.monotonic())
                except TransientReplyError as error:
                    wait = pause * random.uniform(0.5, 1.0)
                    if time.monotonic() + wait >= give_up_at:
                        raise
                    logger.warning("reward model, trying again in %.1f s: %s", wait, error)
                await asyncio.sleep(wait)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    async def _post(self, session: aiohttp.ClientSession, payload: dict[str, Any], seconds: float) -> Any:
        try:
            async with session.post(self._url, json=payload, timeout=aiohttp.ClientTimeout(total=seconds)) as reply:
                if reply.status >= 400:
                    body = (await reply.text())[:_MAX_BODY_CHARS]
                    kind = TransientReplyError if reply.status == 429 or reply.status >= 500 else EngineError
                    raise kind(f"--rm-url {self._url} answered {reply.status}: {body}")
                return await reply.json(content_type=None)
        except TimeoutError as error:
            raise RewardTimeoutError(
                f"the rollout waited {self._timeout_seconds:g} s for the reward model at --rm-url {self._url}"
            ) from error
        except aiohttp.ClientError as error:
            raise TransientReplyError(f"--rm-url {self._url} cannot be reached: {error!r}") from error
        except ValueError as error:
            raise EngineError(f"--rm-url {self._url} did not answer with JSON: {error}") from error

    async def _open(self) -> aiohttp.ClientSession:
        """The session of the running loop; a session of another loop cannot be used."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self._num_connections))
            self._places = asyncio.Semaphore(self._num_connections)
            self._loop = loop
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class TransientReplyError(EngineError):
    """A failure that may pass: no connection, 429 or 5xx."""
