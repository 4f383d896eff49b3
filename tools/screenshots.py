"""Takes the pictures of docs/view.md from a run, by preference the demo's: `python tools/screenshots.py runs/demo`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from browser import Page, browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"
READY = {
    "overview": "document.querySelectorAll('figure canvas').length >= 6 && document.querySelector('.verdict pre')",
    "rollouts": "document.querySelector('.member .t')",
    "timeline": "document.querySelector('table.plain')",
    "compare": "document.querySelectorAll('.compare .member').length === 2",
}
"""What a view shows once it is complete."""


def take(page: Page, url: str) -> None:
    """Every view in both themes, the rollouts with a token's numbers."""
    steps = json.loads(page.evaluate(f"fetch('{url}api/steps?run=0').then((answer) => answer.text())"))
    step = steps[len(steps) // 4]
    views = {
        "overview": "#/overview",
        "rollouts": f"#/rollouts?run=0&step={step}&sort=spread",
        "timeline": "#/timeline",
        "compare": f"#/compare?run=0&step={steps[0]}&to={steps[-1]}",
    }
    for theme in ("light", "dark"):
        page.prefer(theme)
        for view, address in views.items():
            page.open("about:blank")
            page.open(url + address)
            page.wait(READY[view])
            if view == "timeline":
                for _ in range(5):  # a few steps of it
                    page.press("+")
            if view == "rollouts":
                x, y = page.evaluate(
                    "(({x, y}) => [x + 3, y + 3])(document.querySelector('.member .t').getBoundingClientRect())"
                )
                page.move(x, y)
                page.wait("!document.getElementById('tip').hidden")
            time.sleep(0.5)  # charts are drawn in the next frames
            page.screenshot(IMAGES / f"view-{view}-{theme}.png")
            page.move(0, 0)
    assert page.problems == [], page.problems


def main(run: str) -> None:
    command = [sys.executable, "-m", "trivium", "view", run]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = re.findall(r"http://\S+", server.stdout.readline())[0]
        IMAGES.mkdir(exist_ok=True)
        with browser() as page:
            page.resize(1280, 800)
            page.open(url)
            page.wait("document.querySelector('figure')")
            take(page, url)
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main(sys.argv[1])
