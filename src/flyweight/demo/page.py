"""The control server of a demo, as a process that ends with its parent: `serve`, and no more."""

from __future__ import annotations

import runpy

from flyweight.demo.children import obey

if __name__ == "__main__":
    obey()
    runpy.run_module("flyweight.cli", run_name="__main__", alter_sys=True)
