"""The page in a real browser, where there is one: no complaint, and nothing cut off at any width and scheme."""

import base64
import json
import os
import re
import shutil
import subprocess

import pytest

from choros.tools.demo.report import render, write

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
WIDTHS = (390, 820, 1440)
SCHEMES = ("light", "dark")

# Elements that reach beyond the window, text that its box or the picture cuts off, and texts of a picture that overlap.
FAULTS = """(() => {
  const faults = [], limit = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > limit) faults.push('the page scrolls sideways');
  for (const element of document.body.querySelectorAll('*')) {
    const box = element.getBoundingClientRect();
    const what = element.tagName + ' ' + (element.textContent || '').trim().slice(0, 40);
    if (!box.width || element.closest('defs, clipPath')) continue;
    if (!element.closest('svg') || element.tagName === 'svg') {
      if (box.right > limit + 1 || box.left < -1) faults.push('beyond the window: ' + what);
      const style = getComputedStyle(element);
      if (element.scrollWidth > element.clientWidth + 1 && element.clientWidth && style.display !== 'inline'
          && element.tagName !== 'svg') faults.push('cut off: ' + what);
    }
  }
  for (const picture of document.querySelectorAll('svg')) {
    const frame = picture.getBoundingClientRect();
    if (!frame.width) continue;
    const texts = [...picture.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    for (const [text, box] of texts) {
      if (box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2
          || box.bottom > frame.bottom + 2) faults.push('outside its picture: ' + text);
      if (box.height < 8) faults.push('too small: ' + text);
    }
    texts.forEach(([one, a], i) => texts.slice(0, i).forEach(([other, b]) => {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 4) faults.push('overlap: ' + one + ' / ' + other);
    }));
  }
  return faults;
})()"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine"),
]


class Browser:
    """A browser that obeys the DevTools protocol over a pipe."""

    def __init__(self, profile):
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()
        os.set_inheritable(read_commands, True)
        os.set_inheritable(write_answers, True)
        command = [BROWSER, *QUIET, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        shell = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(read_commands, write_answers),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._rest, self._number, self._session = b"", 0, None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self):
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def show(self, page, width, scheme):
        """Load a page at a width and color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path):
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def browse(page, tmp_path, *flags):
    command = [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_browser_reads_it_without_a_complaint(make_report, tmp_path):
    pytest.importorskip("matplotlib", reason="the charts need matplotlib")
    page = write(make_report(seeds=2, failed=("AEASGD",)), tmp_path / "out")
    done = browse(page, tmp_path, "--dump-dom", "--enable-logging=stderr", "--v=0")
    assert done.returncode == 0, done.stderr
    dom = done.stdout
    assert dom.count("<svg") == 12
    assert dom.count("<article") == 7
    assert len(re.findall(r"<tr><th scope=\"row\">", dom)) == 13
    assert "<title>Choros: 6 algorithms on digits</title>" in dom
    assert "CONSOLE" not in done.stderr


def test_a_broken_page_would_be_noticed(make_report, tmp_path):
    pytest.importorskip("matplotlib", reason="the charts need matplotlib")
    page = write(make_report(), tmp_path / "out")
    page.write_text(page.read_text().replace("</body>", "<script>alert(1)</script></body>"))
    done = browse(page, tmp_path, "--dump-dom", "--enable-logging=stderr", "--v=0")
    assert "CONSOLE" in done.stderr  # the page's own policy refuses the script, and says so


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages that are written once: the same for each width and scheme."""
    return tmp_path_factory.mktemp("pages"), {}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("names", ["few", "all"])
def test_nothing_is_cut_off_or_overlaps(names, width, scheme, make_report, browser, pages, tmp_path):
    pytest.importorskip("matplotlib", reason="the charts need matplotlib")
    folder, written = pages
    if names not in written:
        more = {}
        if names == "all":
            from choros import algorithms

            more = {"names": {"plain fit": None, **{kind.__name__: kind().mode for kind in algorithms.ALL}}}
        page = render(make_report(seeds=3, failed=("DOWNPOUR",), **more))
        written[names] = folder / f"{names}.html"
        written[names].write_text(page)
    browser.show(written[names], width, scheme)
    shown = tmp_path / f"{names}-{width}-{scheme}.png"
    browser.screenshot(shown)
    if os.environ.get("CHOROS_SCREENSHOTS"):  # a folder, to look at them
        shutil.copy(shown, os.environ["CHOROS_SCREENSHOTS"])
    assert shown.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert browser.evaluate("window.innerWidth") == width
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 23, 27)" if scheme == "dark" else "rgb(255, 255, 255)"
    )
    assert browser.evaluate(FAULTS) == []


def test_what_is_cut_off_would_be_noticed(make_report, browser, tmp_path):
    pytest.importorskip("matplotlib", reason="the charts need matplotlib")
    page = write(make_report(), tmp_path / "out")
    cut = '<div style="width: 5rem; overflow: hidden; white-space: nowrap">cut off at its right</div>'
    wide = '<div style="width: 500px">too wide</div>'
    page.write_text(page.read_text().replace("</body>", f"{cut}{wide}</body>"))
    browser.show(page, 390, "light")
    faults = " ".join(browser.evaluate(FAULTS))
    assert "cut off: DIV cut off at its right" in faults
    assert "beyond the window: DIV too wide" in faults
