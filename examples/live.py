"""A trainer and two engines on one machine: each new version is in both before anybody notices.

    python examples/live.py

The engines are processes of their own that serve from the very parameters that are updated. One is
killed with SIGKILL in the middle of it, and another takes its place and catches up. At the end the
weights of every engine are compared with the trainer's, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import flyweight as fw
from flyweight.digest import digest

NUM_VERSIONS = 12


def policy(width):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(8)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 16))


def digests(model):
    """One number for each parameter: equal only if every bit is."""
    flat = (each.detach().contiguous().view(-1).view(torch.uint8) for each in model.parameters())
    return [digest(each.numpy()) for each in flat]


def engine(address, name, width):
    """Serve, and take over each version as it comes; end with the last one."""
    model = policy(width)
    with fw.Replica(model, address, name=name) as replica, torch.inference_mode():
        for report in replica.follow(timeout_seconds=60):
            replica.check_servable()
            model(torch.ones(1, width))  # serving
            if report.version == NUM_VERSIONS:
                print(*digests(model))
                return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--engine", nargs=2, metavar=("ADDRESS", "NAME"))
    options = parser.parse_args()
    if options.engine:
        engine(*options.engine, options.width)
        return
    with tempfile.TemporaryDirectory() as directory:
        show(f"unix:{Path(directory) / 'policy'}", options.width)


def show(address, width):
    def start(name):
        command = [sys.executable, __file__, "--width", str(width), "--engine", address, name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    model = policy(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engines = {name: start(name) for name in ("engine 1", "engine 2")}
    try:
        with fw.Publisher(model, address, keep="memory") as publisher:
            for version in range(1, NUM_VERSIONS + 1):
                model(torch.randn(4, width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                report = publisher.publish(version, num_replicas=2, timeout_seconds=60)
                print(f"  {report}")
                if version == NUM_VERSIONS // 2:
                    victim = engines.pop("engine 1")
                    os.kill(victim.pid, signal.SIGKILL)
                    victim.communicate()
                    print("  engine 1 was killed; engine 3 takes its place")
                    engines["engine 3"] = start("engine 3")
            wanted = digests(model)
            held = {name: each.communicate(timeout=60)[0] for name, each in engines.items()}
    finally:
        for each in engines.values():
            each.kill()
            each.communicate()
    is_whole = True
    for name, text in held.items():
        is_same = list(map(int, text.split())) == wanted
        is_whole = is_whole and is_same
        print(f"  {'yes' if is_same else 'NO '}  {name} holds bit for bit what the trainer holds")
    if not is_whole:
        raise SystemExit(1)


if __name__ == "__main__":
    started = time.monotonic()
    main()
    if "--engine" not in sys.argv:
        print(f"  {time.monotonic() - started:.1f} s")
