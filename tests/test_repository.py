"""What holds for the repository as a whole: what is installed, what is imported, and what no file may say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parent.parent

TEXT = {".cfg", ".css", ".html", ".in", ".js", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ".yml", ""}
# Spelled so that this file does not contain what it looks for.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.])/(?:" + "root|work|home/[a-z]+|Users/[A-Za-z]+" + r")/\w"),
    "a package host": re.compile("files.pythonhosted" + r"\.org|pypi" + r"\.org/simple|download\.pytorch" + r"\.org"),
    "a drive of one machine": re.compile(r"\b[A-Z]:\\\\?Users\\"),
}


def repository_files():
    """Every text file of the project; git's view where there is one, without what it ignores."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        files = [ROOT / name for name in listed if name]
    else:
        skipped = {".venv", "__pycache__", ".git", "demo-output"}
        files = [f for f in ROOT.rglob("*") if not skipped.intersection(f.relative_to(ROOT).parts)]
    return [f for f in files if f.is_file() and f.suffix in TEXT and f.name != "LICENSE"]


def test_no_file_names_one_machine_or_a_package_host():
    found = []
    for file in repository_files():
        text = file.read_text(encoding="utf-8")
        for what, pattern in FORBIDDEN.items():
            if match := pattern.search(text):
                found.append(f"{file.relative_to(ROOT)}: {what}: {match[0]}")
    assert found == []


def in_fresh_python(probe, *arguments, cwd):
    """What ``probe`` prints in a process of its own, started outside the checkout."""
    command = [sys.executable, "-c", probe, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


def test_the_folders_that_must_not_be_installed_are_not_on_the_path(tmp_path):
    # ComfyUI has a module `nodes` of its own, and other packs bring their own `tests`.
    probe = "import importlib.util as u; print([n for n in ('nodes', 'tests', 'demo', 'dev_tools') if u.find_spec(n)])"
    assert in_fresh_python(probe, cwd=tmp_path) == "[]"


def test_import_loads_no_library_that_is_not_needed(tmp_path):
    probe = (
        "import sys; import torch, safetensors; before = set(sys.modules); import quant_core; "
        "print(sorted({n.partition('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    assert in_fresh_python(probe, cwd=tmp_path) == "['quant_core']"


def test_listing_the_methods_imports_no_quantization_library(tmp_path):
    probe = (
        "import sys, quant_core; quant_core.backends.load_all_backends(); assert len(quant_core.QUANT_METHODS) >= 14; "
        "print([n for n in ('torchao', 'bitsandbytes', 'comfy_kitchen', 'comfy') if n in sys.modules])"
    )
    assert in_fresh_python(probe, cwd=tmp_path) == "[]"


def project_table():
    """The ``[project]`` strings of pyproject.toml (Python 3.10 has no TOML reader)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project]\n")[2].partition("\n[")[0]
    return dict(re.findall(r'^([a-z-]+) = "(.*)"$', text, flags=re.M))


def test_version_is_written_the_same_twice():
    import quant_core

    assert project_table()["version"] == quant_core.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, so that no build folder appears in the checkout."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "demo-output", "*.egg-info", "build", ".*_cache")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(source),
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
    ]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=False)
    assert result.returncode == 0, result.stdout
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_quant_core_and_its_licence_only(wheel):
    version = project_table()["version"]
    assert wheel.name == f"quantcore-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"quantcore-{version}.dist-info/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {"quant_core", f"quantcore-{version}.dist-info"}
    assert f"quantcore-{version}.dist-info/licenses/LICENSE" in names
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "quant_core").rglob("*.py")}
    assert sources <= set(names)
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.10" in metadata


def test_wheel_works_on_its_own(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    probe = "import sys; sys.path.insert(0, sys.argv[1]); import quant_core, quant_core.cli; print(quant_core.__file__)"
    imported = in_fresh_python(probe, tmp_path / "site", cwd=tmp_path)
    assert Path(imported).is_relative_to(tmp_path / "site")


def test_checkout_in_a_folder_with_a_dash_does_not_trip_pytest(tmp_path):
    # In custom_nodes the checkout is called ComfyUI-QuantCore, and holds an __init__.py: ComfyUI's door.
    root = tmp_path / "custom_nodes" / "ComfyUI-QuantCore"
    (root / "tests" / "host").mkdir(parents=True)
    for name in ("pyproject.toml", "__init__.py", "tests/conftest.py"):
        shutil.copy(ROOT / name, root / name)
    for folder in ("tests", "tests/host"):
        (root / folder / "test_probe.py").write_text(
            "import sys\n\ndef test_probe(pytestconfig):\n    assert 'nodes' not in sys.modules\n"
            f"    assert pytestconfig.rootpath.name == 'ComfyUI-QuantCore' and {folder!r} in __file__\n"
        )
    runner = ROOT / "dev_tools" / "run_pytest.py"
    command = [sys.executable, str(runner), "", "-q", "-p", "no:cacheprovider", "-k", "probe"]
    result = subprocess.run(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=False
    )
    assert result.returncode == 0 and "2 passed" in result.stdout, result.stdout
