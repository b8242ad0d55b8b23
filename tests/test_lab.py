"""`ddp-course lab` opens JupyterLab where the course is, on the first lesson."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

OPTIONS = ["--no-browser", "--allow-root", "--port=0", "--IdentityProvider.token="]


def ask(address: str, seconds: float = 30) -> dict:
    """Return the server's answer; it prints its address a moment before it listens."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(address, timeout=seconds) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise


def test_lab_serves_the_course_and_starts_on_the_first_lesson(tmp_path):
    server = subprocess.Popen(
        [sys.executable, "-m", "ddp_course", "lab", *OPTIONS],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
    )  # fmt: skip
    try:
        address = next(
            found[0] for line in server.stdout if (found := re.findall(r"http://127\S+", line))
        )
        assert address.endswith("/lab/tree/notebooks/00_start_here.ipynb")
        root = address.partition("/lab")[0]
        names = {item["name"] for item in ask(f"{root}/api/contents/")["content"]}
        assert {"notebooks", "exercises", "README.md"} <= names
    finally:
        server.terminate()
        server.communicate(timeout=20)
