"""Totals that other threads keep, brought to /metrics once a second: steps do not pay for them, and idle time shows."""

import threading
from collections.abc import Callable

from vllm_gaudi_ucm.logger import plugin_logger

SECONDS = 1.0

logger = plugin_logger(__name__)


class MetricsReporter:
    """Calls `report` at intervals in a thread of its own, until `close`; its first exception is logged."""

    def __init__(self, report: Callable[[], None], seconds: float = SECONDS) -> None:
        self._report = report
        self._seconds = seconds
        self._closing = threading.Event()
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="ucm-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Reports a last time, and ends the thread; a second call does nothing."""
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            self._try()
        self._try()

    def _try(self) -> None:
        try:
            self._report()
        except Exception as error:
            if not self._is_broken:
                logger.warning("some gaudi_ucm metrics are not reported: %s: %s", type(error).__name__, error)
            self._is_broken = True
