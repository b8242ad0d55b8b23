"""What a person does in JupyterLab, for tests."""

import nbformat
import psutil

IDLE = """() => document.querySelector('.jp-Notebook') &&
    ![...document.querySelectorAll('.jp-InputPrompt')].some(e => e.textContent.includes('*'))"""
BUSY = """() =>
    [...document.querySelectorAll('.jp-InputPrompt')].some(e => e.textContent.includes('*'))"""


def open_notebook(page, lab, path):
    address, _, _ = lab
    for _ in range(3):  # the server prints its address a moment before it listens
        try:
            page.goto(f"{address}/lab/tree/{path}?reset")
            break
        except Exception as error:
            if "REFUSED" not in str(error):
                raise
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.locator(".jp-Toolbar-kernelName", has_text="Python 3").first.wait_for()


def open_cells(page, lab, name, *cells):
    """Open a new notebook with these cells."""
    cells = [nbformat.v4.new_code_cell(code) for code in cells]
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=spec), lab[1] / name)
    open_notebook(page, lab, name)


def run_all(page, wait=True):
    page.get_by_role("menuitem", name="Run", exact=True).first.click()
    page.get_by_text("Run All Cells", exact=True).click()
    if wait:
        page.wait_for_function(BUSY)


def in_run(process) -> bool:
    """Whether this is a guardian or a rank: a copy of the fork server, the kernel's child."""
    try:
        command = process.cmdline()
        return "fork_server" in " ".join(command) and process.parent().cmdline() == command
    except psutil.NoSuchProcess:
        return False


def ranks_of(lab) -> list[psutil.Process]:
    """The guardians and ranks of all runs."""
    return [p for p in psutil.Process(lab[2].pid).children(recursive=True) if in_run(p)]
