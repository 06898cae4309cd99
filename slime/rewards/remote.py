"""A reward model behind an HTTP address.

Tests hold: transient faults are retried a bounded number of times, a 4xx is raised at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import aiohttp

from slime.errors import ConfigError, EngineError, WaitTimeoutError
from slime.types import Sample

logger = logging.getLogger(__name__)

_MAX_BODY_CHARS = 500


class RemoteReward:
    """Client of ``--rm-url``: one session with at most 64 connections.

    Args:
        url: Where ``{prompt, response, label}`` is posted; the JSON answer is the reward.
        max_attempts: Tries per sample.
        timeout_seconds: Bound of each try.
        max_backoff_seconds: Longest wait between tries, before jitter.
    """

    def __init__(
        self,
        url: str | None,
        *,
        max_attempts: int = 10,
        timeout_seconds: float = 120.0,
        max_backoff_seconds: float = 30.0,
        num_connections: int = 64,
    ) -> None:
        if not url:
            raise ConfigError("--rm-type remote_rm needs the address of the reward model: give --rm-url URL")
        self._url = url
        self._max_attempts = max_attempts
        self._timeout_seconds = timeout_seconds
        self._max_backoff_seconds = max_backoff_seconds
        self._num_connections = num_connections
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(self, sample: Sample, response: str) -> Any:
        """The remote reward of one response.

        Raises:
            EngineError: The server refuses the request, or still fails after the last try.
            WaitTimeoutError: The last try got no answer in time.
        """
        payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
        for attempt in range(1, self._max_attempts + 1):
            try:
                return await self._post(payload)
            except (EngineError, WaitTimeoutError) as error:
                if attempt == self._max_attempts or not _is_transient(error):
                    raise
                logger.warning("reward model, try %d of %d: %s", attempt, self._max_attempts, error)
            wait = min(2.0**attempt, self._max_backoff_seconds)
            await asyncio.sleep(wait * (1 + 0.25 * random.random()))
        raise AssertionError("unreachable: the last try returns or raises")

    async def _post(self, payload: dict[str, Any]) -> Any:
        session = await self._open()
        try:
            async with session.post(self._url, json=payload) as reply:
                if reply.status >= 400:
                    body = (await reply.text())[:_MAX_BODY_CHARS]
                    kind = TransientReplyError if reply.status == 429 or reply.status >= 500 else EngineError
                    raise kind(f"--rm-url {self._url} answered {reply.status}: {body}")
                return await reply.json(content_type=None)
        except TimeoutError as error:
            raise WaitTimeoutError(
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
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
                connector=aiohttp.TCPConnector(limit=self._num_connections),
            )
            self._loop = loop
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class TransientReplyError(EngineError):
    """A failure that may pass: no connection, 429 or 5xx."""


def _is_transient(error: Exception) -> bool:
    return isinstance(error, TransientReplyError | WaitTimeoutError)
