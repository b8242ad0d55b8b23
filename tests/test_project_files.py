"""Files that other tools read are well-formed, and what the texts name is there."""

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
YAML = [
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
    ROOT / "environment.yml",
    *(ROOT / ".github").rglob("*.yml"),
]
TEXTS = [*ROOT.glob("*.md"), *ROOT.glob("exercises/*.md"), *ROOT.glob("solutions/*.md")]
FOLDERS = "notebooks|ddp_course|exercises|solutions|tests|tools"
relative = pytest.mark.parametrize(
    "text", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix()
)


def parts_of(text):
    """The link targets and the paths in backticks that should be files of the course."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    paths = re.findall(rf"`((?:{FOLDERS})/[\w./]+)`", text)
    return links, [path for path in paths if "NN" not in path]


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_yaml_is_well_formed(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_citation_has_what_its_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{citation["version"]}"' in project


def test_the_devcontainer_names_scripts_that_are_there():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    python, script = container["postCreateCommand"].split()
    assert python == "python" and (ROOT / script).is_file()


@relative
def test_links_lead_somewhere(text):
    links, paths = parts_of(text.read_text())
    missing = [link for link in links if not (text.parent / link).exists()]
    assert missing + [path for path in paths if not (ROOT / path).exists()] == []


@relative
def test_make_has_what_the_text_says(text):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:^|`)make ([a-z-]+)", text.read_text(), re.MULTILINE)
    assert set(named) <= set(targets)
