"""Engines that are stopped and started anew over one folder of stored prefixes."""

from __future__ import annotations

from pathlib import Path

from support.engines import Driver, make_engine, tiny_namespace

from vllm_mlx.engine.kv.spill import open_spill


class Restarts:
    """Make drivers over one folder, each as if in a process started anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drivers: list[Driver] = []

    def start(self, kind: str = "full", **options: object) -> Driver:
        """Start an engine whose RAM is empty."""
        namespace = tiny_namespace(kind)
        spill = open_spill(namespace, self.folder, max_bytes=None)
        driver = Driver(
            make_engine(kind, namespace=namespace, spill=spill, **options)  # type: ignore[arg-type]
        )
        self.drivers.append(driver)
        return driver

    def stop(self, driver: Driver) -> None:
        """Stop an engine in order."""
        self.drivers.remove(driver)
        driver.engine.close()
