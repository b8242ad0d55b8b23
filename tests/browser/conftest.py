"""A real JupyterLab and a real browser: `make test-browser` installs what these tests need."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
LAB = [
    "--no-browser",
    "--allow-root",
    "--port=0",
    "--IdentityProvider.token=",
    "--expose-app-in-browser",
]

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None
if sync_playwright is None or BROWSER is None:
    collect_ignore_glob = ["test_*.py"]  # not part of `make test`: see `make test-browser`


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A JupyterLab on a copy of the lessons: (address, folder, process)."""
    folder = tmp_path_factory.mktemp("course")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    # keep all cells in the page, not only those in view
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    news = folder / "settings" / "@jupyterlab" / "apputils-extension"
    news.mkdir(parents=True)
    (news / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    environment = {
        **os.environ,
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}", *LAB],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        env=environment,
    )  # fmt: skip
    try:
        found = (re.search(r"http://127[\d.:]+", line) for line in process.stdout)
        yield next(match[0] for match in found if match), folder, process
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture
def page(lab):
    """A page of a fresh browser; its console errors are in `page.errors`."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": 1100, "height": 1000})
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.set_default_timeout(int(os.environ.get("BROWSER_TIMEOUT", 60_000)))
        yield page
        browser.close()


@pytest.fixture
def screenshots(tmp_path):
    """The folder for pictures of pages: SCREENSHOTS of the environment, or a temporary one."""
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
