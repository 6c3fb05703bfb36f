"""Starts the server, the engine and one or more front ends, and shuts them down without losing a response."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from slipstream.config import EngineOptions
from slipstream.engine.process import open_supervisor
from slipstream.errors import ConfigError
from slipstream.server.ending import noting_signals
from slipstream.server.front_end import FrontEnd
from slipstream.server.front_end_group import FrontEndGroup
from slipstream.server.front_end_process import (
    LOG_FORMAT,
    link_address,
    open_linked_client,
    open_own_listener,
    run_front_end,
)
from slipstream.server.settings import ServerSettings
from slipstream.speculate.options import synthetic_warning

_EXIT_SIGTERM = 143  # as shells report it
_MOST_FRONT_ENDS = 4  # by default
_CORES_PER_FRONT_END = 4


def serve(options: EngineOptions, settings: ServerSettings) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=LOG_FORMAT)
    if (warning := synthetic_warning(options)) is not None:
        logging.warning(warning)
    num_front_ends = count_front_ends(settings.api_server_count)
    # Bound first: a port in use should not cost the loading of a model.
    listener = open_own_listener(settings.host, settings.port, is_shared=num_front_ends > 1)
    with _ended_by_sigterm():
        supervisor, tokenizer = open_supervisor(options, num_front_ends, settings.step_timeout_s)
    watching = threading.Thread(target=supervisor.run, name="slipstream-engine-watch", daemon=True)
    watching.start()
    host, port = listener.getsockname()[:2]

    def announce() -> None:
        logging.info("serving %s on http://%s:%s", settings.served_model_name or options.model, host, port)

    try:
        with noting_signals() as ending:
            if num_front_ends == 1:
                client = open_linked_client(link_address(supervisor), supervisor.ready, tokenizer)
                front_end = FrontEnd(client, options.model, settings)
                run_front_end(front_end, listener, announce, ending)
            else:
                group = FrontEndGroup(options.model, settings, supervisor, listener)
                group.run(announce, ending)
    finally:
        supervisor.close(watching)
        listener.close()
    signal.raise_signal(ending.number)  # its default effect, now that everything is closed
    return 0


def count_front_ends(asked: int | None) -> int:
    """As many as were asked for, or a quarter of the cores, since the engine and its clients need some too."""
    can_share = sys.platform == "linux"  # elsewhere the kernel does not spread connections over processes
    if asked is not None and asked > 1 and not can_share:
        raise ConfigError(f"--api-server-count {asked} needs Linux; leave it out")
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if can_share else 1
    return max(1, min(_MOST_FRONT_ENDS, cores // _CORES_PER_FRONT_END))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """While the model loads, SIGTERM exits cleanly: the engine and its sockets are removed as well."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(_EXIT_SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
