"""Make docs/playground.png anew: `python scripts/playground_picture.py http://127.0.0.1:30000/ docs/playground.png`.

Runs one prompt both ways on a live server and takes a picture of the comparison. Needs chromium and chromedriver.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.server.browser import browser

PROMPT = (
    "Copy this text exactly: Speculative decoding drafts several tokens with something cheap, and verifies all of them "
    "with the large model in one pass."
)
url, target = sys.argv[1:]
with tempfile.TemporaryDirectory() as profile, browser(profile) as window:
    window.cdp("Emulation.setDeviceMetricsOverride", width=1120, height=520, deviceScaleFactor=1.5, mobile=False)
    window.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    window.open(url)
    window.click("#to-compare")
    window.type(PROMPT + "\ue007")
    window.until("!running && document.getElementById('verdict').textContent.startsWith('Identical')", 300)
    window.until("document.getElementById('running').textContent === '0'")
    print(window.run("return document.getElementById('verdict').textContent"))
    Path(target).write_bytes(window.screenshot())
