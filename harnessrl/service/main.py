"""The service process: gateway, store and controller on one event loop. `python -m harnessrl.service.main`

It reads one JSON line (ServiceConfig) from stdin and prints {"url": ..., "controller": ...} when it is ready.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass

from aiohttp import web

from harnessrl.service import child
from harnessrl.service.api import Api
from harnessrl.service.attempts import Attempts
from harnessrl.service.controller import Controller
from harnessrl.service.engine_backend import EngineBackend
from harnessrl.service.engine_client import EngineClient
from harnessrl.service.events import Events
from harnessrl.service.gate import Gate
from harnessrl.service.gateway import Backend, Gateway
from harnessrl.service.server import make_app
from harnessrl.service.settings import ServiceConfig, read_settings
from harnessrl.service.store import Store
from harnessrl.service.tokens import TextCodec
from harnessrl.service.upstream import UpstreamBackend


@dataclass(frozen=True, kw_only=True)
class Running:
    """Where a running service is reached."""

    url: str
    """Of the gateway, for harnesses and clients."""
    controller: str
    """ZeroMQ address for workers."""


@asynccontextmanager
async def running(config: ServiceConfig) -> AsyncIterator[Running]:
    """Run a service inside the block.

    Raises:
        ValueError: An address is taken or is none, or the store or the tokenizer cannot be opened; says which.
    """
    codec = TextCodec(config.tokenizer) if config.tokenizer else None
    async with AsyncExitStack() as stack:
        store = stack.enter_context(closing(Store(config.store)))
        events, gate = Events(store), Gate(config.hold_seconds)
        backend = _backend(config, codec, store, events, gate)
        stack.push_async_callback(backend.close)
        app = make_app(config, store, Api(config, store, events, gate), Gateway(store, events, backend))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        url = await _listen(runner, config)
        controller = stack.enter_context(closing(Controller(config, store, events, url)))
        yield Running(url=url, controller=controller.address)


def _backend(config: ServiceConfig, codec: TextCodec | None, store: Store, events: Events, gate: Gate) -> Backend:
    attempts = Attempts(events, config.max_calls)
    if config.engine is None:
        return UpstreamBackend(config, store, attempts, gate)
    assert codec is not None
    return EngineBackend(config, codec, EngineClient(config.engine), attempts, gate)


async def _listen(runner: web.AppRunner, config: ServiceConfig) -> str:
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        raise ValueError(f"{config.host}:{config.port} cannot be listened on: {error.strerror}") from None
    host = "127.0.0.1" if config.host in ("0.0.0.0", "") else config.host
    port = runner.addresses[0][1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _main(config: ServiceConfig, follow_stdin: bool) -> None:
    stop = child.stop_event(follow_stdin=follow_stdin)
    async with AsyncExitStack() as stack:
        try:
            where = await stack.enter_async_context(running(config))
        except ValueError as error:
            child.refuse(str(error))
        gc.freeze()  # what exists now stays: later collections need not look at it
        child.announce({"url": where.url, "controller": where.controller})
        await stop.wait()


def main() -> None:
    """Run the service until its parent goes, or SIGTERM or SIGINT; exit code 2 for bad input, 1 for a store that fails."""
    serve(child.read_line(), follow_stdin=True)


def serve(line: bytes | str, *, follow_stdin: bool) -> None:
    """Run the service that a JSON line of ServiceConfig describes."""
    logging.basicConfig(level=logging.WARNING, format="service: %(message)s")
    try:
        config = read_settings(ServiceConfig, line)
    except ValueError as error:
        child.refuse(str(error))
    asyncio.run(_main(config, follow_stdin))


if __name__ == "__main__":
    main()
