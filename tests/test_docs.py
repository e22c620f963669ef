"""The code in README.md and docs/ runs as it stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_runs_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs_example"}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), namespace)


def test_int9_in_the_docs_is_the_one_that_is_tested():
    code = (ROOT / "tests" / "toy_int9.py").read_text(encoding="utf-8").strip()
    assert code in [block.strip() for block in blocks(ROOT / "docs" / "backends.md")]


def test_links_between_pages_exist():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_method_is_in_the_hardware_table():
    from quant_core import QUANT_METHODS, backends

    backends.load_all_backends()
    text = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    built_in = [n for n, spec in QUANT_METHODS.items() if spec.backend in ("bitsandbytes", "torchao", "comfy_kitchen")]
    assert [n for n in built_in if f"`{n}`" not in text] == []
