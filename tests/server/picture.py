"""Make docs/images/page.png: python tests/server/picture.py"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from browser import chromium  # noqa: E402
from child_processes import until  # noqa: E402
from control_site import TOKEN, Engine, Trainer, serving  # noqa: E402
from flyweight.lifecycle.control import Control  # noqa: E402

NBYTES = 64 << 20


def main():
    place = Path(tempfile.mkdtemp())
    address, cells = f"unix:{place}/policy", [place / f"engine-{n}.cell" for n in range(2)]
    with (
        Trainer(address, place / "run", nbytes=NBYTES) as trainer,
        Engine(address, cells[0], store=place / "run", nbytes=NBYTES) as engine,
        Engine(address, cells[1], store=place / "run", nbytes=NBYTES),
        serving([Control(cell, 1) for cell in cells], str(place / "run")) as site,
        chromium(1120, 1510) as browser,
    ):
        names = ("engine-0", "engine-1")
        for version in range(4, 16):
            until(
                lambda: all(
                    r["state"] == "SERVING" for r in site.good("GET", "/status")["replicas"]
                )
            )
            trainer.publish(version)
            until(lambda v=version: all(site.replica(name)["version"] == v for name in names))
        engine.tell("request")
        site.ask("POST", "/v1/pause?replica=engine-0&timeout=0.1")
        site.ask("POST", "/v1/sleep?replica=engine-1&tags=kv_cache")
        site.ask("POST", "/v1/resume?replica=engine-1")
        site.ask("POST", "/v1/wakeup?replica=engine-1")
        browser.get(f"{site.address}/#token={TOKEN}")
        until(lambda: browser.find_elements("css selector", "#faults tbody tr"))
        (ROOT / "docs/images").mkdir(exist_ok=True)
        for theme, name in (("light", "page.png"), ("dark", "dark.png")):
            features = [{"name": "prefers-color-scheme", "value": theme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            folder = ROOT / "docs/images" if theme == "light" else place
            browser.save_screenshot(str(folder / name))
            print(folder / name)
        engine.tell("finish")


if __name__ == "__main__":
    main()
