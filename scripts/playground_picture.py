"""Make docs/playground.png anew: `python scripts/playground_picture.py http://127.0.0.1:30000/ docs/playground.png`.

Asks a live server for a function and takes a picture of the reply, with the card of a corrected token. Needs chromium
and chromedriver.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.server.browser import browser

PROMPT = "Write a Python function that adds two numbers."
TO_THE_TOP = """
document.querySelector("main").scrollTop = 0;
return new Promise((scrolled) => setTimeout(scrolled, 200));
"""
POINT = """
const tokens = Array.from(document.querySelectorAll("#log .t.corrected"));
const seen = tokens.filter((each) => each.closest("p") && each.getBoundingClientRect().bottom < 320);
seen.at(-1).dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
"""
url, target = sys.argv[1:]
with tempfile.TemporaryDirectory() as profile, browser(profile) as window:
    window.cdp("Emulation.setDeviceMetricsOverride", width=1120, height=660, deviceScaleFactor=1.2, mobile=False)
    window.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    window.open(url)
    window.type(PROMPT + "\ue007")
    window.until("document.querySelector('.reply .tools') && !document.body.classList.contains('busy')", 300)
    window.until("document.getElementById('running').textContent === '0'")
    window.run(TO_THE_TOP)
    window.run(POINT)
    print(window.run("return document.querySelector('#log .figures').textContent"))
    Path(target).write_bytes(window.screenshot())
