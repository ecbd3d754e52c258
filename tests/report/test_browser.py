"""The page in a real browser, where there is one."""

import re
import shutil
import subprocess

import pytest

from choros.tools.demo.report import write

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

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine"),
]


def browse(page, tmp_path, *flags):
    command = [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_browser_reads_it_without_a_complaint(make_report, tmp_path):
    pytest.importorskip("matplotlib", reason="the charts need matplotlib")
    page = write(make_report(seeds=2, failed=("AEASGD",)), tmp_path / "out")
    done = browse(page, tmp_path, "--dump-dom", "--enable-logging=stderr", "--v=0")
    assert done.returncode == 0, done.stderr
    dom = done.stdout
    assert dom.count("<svg") == 4
    assert dom.count("<article") == 6
    assert len(re.findall(r"<tr><th scope=\"row\">", dom)) == 6
    assert "<title>Choros: 6 algorithms on digits</title>" in dom
    assert "CONSOLE" not in done.stderr


def test_a_broken_page_would_be_noticed(make_report, tmp_path):
    pytest.importorskip("matplotlib", reason="the charts need matplotlib")
    page = write(make_report(), tmp_path / "out")
    page.write_text(page.read_text().replace("</body>", "<script>alert(1)</script></body>"))
    done = browse(page, tmp_path, "--dump-dom", "--enable-logging=stderr", "--v=0")
    assert "CONSOLE" in done.stderr  # the page's own policy refuses the script, and says so
