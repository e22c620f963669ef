"""dev.py: set-up, the finder of ComfyUI, the link into it, and the summary; on real folders and real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from _pytest.monkeypatch import MonkeyPatch

ROOT = Path(__file__).absolute().parent.parent


@pytest.fixture(scope="module")
def tools():
    """The modules of dev_tools, which are on ``sys.path`` for dev.py only."""
    with MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from dev_tools import comfyui, commands, environment, process, testing

        yield {m.__name__.rpartition(".")[2]: m for m in (comfyui, commands, environment, process, testing)}


def dev(*arguments, python=sys.executable, root=ROOT, env=None, cwd=None):
    return subprocess.run(
        [str(python), str(root / "dev.py"), *map(str, arguments)],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def copy_of_dev(folder):
    shutil.copytree(ROOT / "dev_tools", folder / "dev_tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dev.py", folder)
    return folder


# ---------------------------------------------------------------------- commands and Python versions


def test_help_and_unknown_commands():
    assert dev("--help").returncode == 0
    wrong = dev("tset")
    assert wrong.returncode == 2 and "'tset'" in wrong.stdout and "usage" in wrong.stdout
    assert dev().returncode == 2


def test_dev_tools_import_the_standard_library_only():
    probe = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules); import dev_tools.commands; "
        "new = {n.partition('.')[0] for n in set(sys.modules) - before} - {'dev_tools'}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run([sys.executable, "-c", probe, ROOT], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_unsupported_pythons_are_named():
    namespace = {"__name__": "dev"}
    exec(compile((ROOT / "dev.py").read_text(encoding="utf-8"), "dev.py", "exec"), namespace)
    refuse = namespace["refuse_python"]
    assert all(refuse((3, minor, 0)) == "" for minor in (10, 11, 12, 13))
    for version in ((3, 9, 1), (3, 14, 0), (4, 0, 0)):
        assert f"Python {version[0]}.{version[1]} is not supported" in refuse(version)


# ---------------------------------------------------------------------- set-up


def test_every_requirement_is_pinned_and_torch_is_first(tools):
    groups = tools["environment"].read_requirements((ROOT / "requirements-dev.txt").read_text(encoding="utf-8"))
    assert set(groups) == {"required", "backends", "without dependencies"}
    assert groups["required"][0].startswith("torch==")
    assert all("==" in requirement for group in groups.values() for requirement in group)


def test_requirement_outside_a_group_is_an_error(tools):
    with pytest.raises(ValueError, match="numpy==1"):
        tools["environment"].read_requirements("# a comment\nnumpy==1\n")


@pytest.mark.parametrize(
    ("output", "unavailable"),
    [
        ("ERROR: Could not find a version that satisfies x\nERROR: No matching distribution found for x==1\n", True),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError'\n"
            "ERROR: No matching distribution found for x==1\n",
            False,
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", False),
    ],
)
def test_platform_without_a_release_is_told_from_a_dead_network(tools, output, unavailable):
    assert bool(tools["environment"].explain_unavailable(output)) is unavailable


@pytest.fixture
def small_checkout(tmp_path):
    """A checkout whose requirements are all on this machine already: its own tiny package."""
    root = copy_of_dev(tmp_path / "a checkout")
    package = root / "quant_core"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tiny"\nversion = "1"\n'
    )
    # The smallest editable build there is: a wheel with one .pth file.
    (root / "backend.py").write_text(
        "import base64, hashlib, os, zipfile\n"
        "def build_editable(folder, config_settings=None, metadata_directory=None):\n"
        "    name = 'tiny-1-py3-none-any.whl'\n"
        "    info = 'tiny-1.dist-info/'\n"
        "    files = {'tiny.pth': os.getcwd(),\n"
        "        info + 'METADATA': 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n',\n"
        "        info + 'WHEEL': 'Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n'}\n"
        "    files[info + 'RECORD'] = ''.join(n + ',,\\n' for n in [*files, info + 'RECORD'])\n"
        "    with zipfile.ZipFile(os.path.join(folder, name), 'w') as z:\n"
        "        for n, text in files.items():\n"
        "            z.writestr(n, text)\n"
        "    return name\n"
        "build_wheel = build_sdist = None\n"
    )
    # pip is in every new environment: nothing is downloaded.
    (root / "requirements-dev.txt").write_text(
        "# [required]\npip\npip\n# [backends]\npip\n# [without dependencies]\npip\n"
    )
    return root


def prepare(root, *more):
    probe = (
        "import json, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); "
        "from dev_tools.environment import prepare; "
        "e = prepare(Path(sys.argv[1]), recreate='--recreate' in sys.argv); "
        "print(json.dumps([str(e.python), e.missing]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe, str(root), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    return result, result.stdout.splitlines()


def test_set_up_once_redone_when_interrupted_or_changed(small_checkout):
    stamp = small_checkout / ".venv" / "quantcore-setup.json"
    first, lines = prepare(small_checkout)
    assert first.returncode == 0, first.stdout
    python, missing = json.loads(lines[-1])
    assert missing == [] and Path(python).exists() and "setting up" in first.stdout
    probe = "import quant_core; print(quant_core.__file__)"
    elsewhere = small_checkout.parent
    where = subprocess.run([python, "-c", probe], cwd=elsewhere, capture_output=True, text=True, check=True)
    assert Path(where.stdout.strip()).samefile(small_checkout / "quant_core" / "__init__.py")

    started = time.perf_counter()
    second, lines = prepare(small_checkout)
    assert len(lines) == 1 and time.perf_counter() - started < 5  # nothing but an interpreter start

    stamp.unlink()  # As an interrupted set-up leaves it: the stamp is written last.
    third, _ = prepare(small_checkout)
    assert "setting up" in third.stdout and stamp.exists()

    with (small_checkout / "requirements-dev.txt").open("a") as file:
        file.write("# changed\n")
    fourth, _ = prepare(small_checkout)
    assert "setting up" in fourth.stdout

    mark = small_checkout / ".venv" / "mark"
    mark.touch()
    fifth, _ = prepare(small_checkout, "--recreate")
    assert fifth.returncode == 0 and not mark.exists()


def test_failed_installation_says_why_and_is_no_set_up(small_checkout):
    requirements = small_checkout / "requirements-dev.txt"
    requirements.write_text(requirements.read_text().replace("[required]\n", "[required]\n./does-not-exist.whl\n"))
    result, _ = prepare(small_checkout)
    assert result.returncode != 0
    assert "does-not-exist.whl" in result.stdout and "free disk space" in result.stdout
    assert not (small_checkout / ".venv" / "quantcore-setup.json").exists()


# ---------------------------------------------------------------------- the finder


def make_comfyui(folder, venv=None):
    (folder / "comfy").mkdir(parents=True)
    (folder / "custom_nodes").mkdir()
    for name in ("main.py", "nodes.py"):
        (folder / name).write_text("")
    if venv is not None:
        python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        python.parent.mkdir(parents=True)
        python.write_text("")
        return python
    return None


def test_finder_prefers_the_variable_then_its_own_then_the_home(tools, tmp_path):
    find = tools["comfyui"].find_comfyui
    home = tmp_path / "home"
    root = tmp_path / "checkout"
    assert find(root, {}, home) is None
    at_home = make_comfyui(home / "ComfyUI", home / "ComfyUI" / "venv")
    assert find(root, {}, home).python == at_home
    usual = make_comfyui(home / "comfy" / "ComfyUI", home / "comfy" / ".venv")
    assert find(root, {}, home).python == usual
    above = make_comfyui(tmp_path / "other", tmp_path / "other" / ".venv")
    inside = tmp_path / "other" / "custom_nodes" / "QuantCore"
    inside.mkdir()
    assert find(inside, {}, home).python == above
    named = make_comfyui(tmp_path / "named", tmp_path / "named" / "venv")
    found = find(inside, {"COMFYUI_PATH": str(tmp_path / "named")}, home)
    assert (found.folder, found.python) == (tmp_path / "named", named)
    assert find(inside, {"COMFYUI_PYTHON": sys.executable}, home).python == Path(sys.executable)


def test_finder_knows_the_portable_build(tools, tmp_path):
    make_comfyui(tmp_path / "ComfyUI")
    python = tmp_path / "python_embeded" / "python.exe"
    python.parent.mkdir()
    python.write_text("")
    found = tools["comfyui"].find_comfyui(tmp_path, {"COMFYUI_PATH": str(tmp_path / "ComfyUI")}, tmp_path)
    assert found.python == python


def test_finder_of_the_older_comfyui(tools, tmp_path):
    comfyui = tools["comfyui"]
    find, name = comfyui.find_older_comfyui, comfyui.OLDER
    assert find({}, tmp_path) is None
    beside = make_comfyui(tmp_path / "comfy" / f"ComfyUI-{name}", tmp_path / "comfy" / "venv")
    assert find({}, tmp_path).python == beside
    own = make_comfyui(tmp_path / "elsewhere" / "ComfyUI-1", tmp_path / "elsewhere" / "venv-1")
    found = find({"COMFYUI_OLDER_PATH": str(tmp_path / "elsewhere" / "ComfyUI-1")}, tmp_path)
    assert (found.folder, found.python) == (tmp_path / "elsewhere" / "ComfyUI-1", own)
    with pytest.raises(tools["process"].DevError, match=r"COMFYUI_OLDER_PATH.*main\.py"):
        find({"COMFYUI_OLDER_PATH": str(tmp_path)}, tmp_path)


def test_finder_refuses_wrong_variables(tools, tmp_path):
    find, error = tools["comfyui"].find_comfyui, tools["process"].DevError
    with pytest.raises(error, match=r"COMFYUI_PATH.*main\.py"):
        find(tmp_path, {"COMFYUI_PATH": str(tmp_path)}, tmp_path)
    make_comfyui(tmp_path / "ComfyUI")
    with pytest.raises(error, match="COMFYUI_PYTHON to the one"):
        find(tmp_path / "x", {}, tmp_path)
    with pytest.raises(error, match="does not exist"):
        find(tmp_path / "x", {"COMFYUI_PYTHON": str(tmp_path / "none")}, tmp_path)


# ---------------------------------------------------------------------- dev.py comfyui


def test_link_is_made_and_removed_and_nothing_else_is_touched(tools, tmp_path):
    linked = tools["comfyui"].linked_pack
    make_comfyui(tmp_path / "ComfyUI")
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "file").write_text("x")
    custom_nodes = tmp_path / "ComfyUI" / "custom_nodes"
    with pytest.raises(KeyboardInterrupt), linked(tmp_path / "ComfyUI", root) as place:
        assert (place / "file").read_text() == "x" and place.parent == custom_nodes
        with linked(tmp_path / "ComfyUI", root) as again:
            assert again == place
        assert place.exists()
        raise KeyboardInterrupt
    assert list(custom_nodes.iterdir()) == [] and (root / "file").exists()

    (custom_nodes / "ComfyUI-QuantCore").mkdir()
    with pytest.raises(tools["process"].DevError, match="not this checkout"), linked(tmp_path / "ComfyUI", root):
        pass
    assert (custom_nodes / "ComfyUI-QuantCore").is_dir()


def fake_main(folder, text):
    make_comfyui(folder)
    (folder / "main.py").write_text(text)
    return {"COMFYUI_PATH": str(folder), "COMFYUI_PYTHON": sys.executable}


def test_comfyui_gets_its_arguments_and_its_exit_code_comes_back(tmp_path):
    env = fake_main(
        tmp_path / "ComfyUI", "import os, sys\nprint(sys.argv[1:], os.listdir('custom_nodes'))\nsys.exit(7)\n"
    )
    result = dev("comfyui", "--cpu", "--port", "1", env=env)
    assert result.returncode == 7
    assert "['--cpu', '--port', '1'] ['ComfyUI-QuantCore']" in result.stdout
    assert os.listdir(tmp_path / "ComfyUI" / "custom_nodes") == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to catch")
def test_terminated_comfyui_leaves_no_link(tmp_path):
    env = fake_main(tmp_path / "ComfyUI", "import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [sys.executable, str(ROOT / "dev.py"), "comfyui", "--cpu"],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        while "up" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
    assert os.listdir(tmp_path / "ComfyUI" / "custom_nodes") == []


# ---------------------------------------------------------------------- dev.py test


def test_arguments_go_to_the_part_they_name(tools, tmp_path, monkeypatch):
    split = tools["testing"].split_arguments
    (tmp_path / "tests" / "host").mkdir(parents=True)
    for name in ("tests/test_a.py", "tests/host/test_b.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "nodes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert split(["-k", "nodes"], tmp_path) == (["-k", "nodes"], [], [])
    assert split(["tests/test_a.py::test_x", "-q"], tmp_path) == (["-q"], ["tests/test_a.py::test_x"], None)
    assert split(["tests/host/test_b.py"], tmp_path) == ([], None, ["tests/host/test_b.py"])


def test_only_a_full_run_is_parallel(tools):
    parallel = tools["testing"].parallel
    options, env = parallel(["-q"], [])
    assert (options == [] and env == {}) if os.cpu_count() == 1 else (options[0] == "-n" and "OMP_NUM_THREADS" in env)
    for one_process in ((["-q"], ["tests/test_a.py"]), (["--pdb"], []), (["-n0"], []), (["-n", "2"], [])):
        assert parallel(*one_process) == ([], {})


@pytest.fixture
def sample_run(tools, tmp_path):
    """``run(text)``: a real pytest run of a file with this text, as a Report."""

    def run(text):
        (tmp_path / "test_sample.py").write_text(text)
        return tools["testing"]._pytest(Path(sys.executable), "", ["-q", "-p", "no:cacheprovider"], tmp_path, {})

    return run


def test_report_counts_each_outcome(sample_run):
    report = sample_run(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0\n"
        "@pytest.fixture\n"
        "def broken(): raise RuntimeError\n"
        "def test_error(broken): pass\n"
        "@pytest.mark.skip(reason='needs a CUDA device')\n"
        "def test_gpu(): pass\n"
        "@pytest.mark.xfail\n"
        "def test_known(): assert 0\n"
    )
    assert (report.code, report.passed, report.failed) == (1, 2, 2)
    assert report.not_run == Counter({"needs a CUDA device": 1})


def test_crashed_run_is_a_failure(sample_run, tools, capsys):
    report = sample_run("import os\ndef test_crash(): os._exit(3)\n")
    assert (report.code, report.failed) == (3, 1)
    assert tools["testing"].summarize({"here": report}) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed"


def test_summary_says_what_did_not_run(tools, capsys):
    report_class, summarize = tools["testing"].Report, tools["testing"].summarize
    core = report_class(0, passed=5, not_run=Counter({"needs a CUDA device": 2}))
    host = report_class(0, not_run=Counter({"host tests, because no ComfyUI was found": 3}))
    assert summarize({"in .venv": core, "in ComfyUI": host}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  NOT RUN: 2 tests: needs a CUDA device" in lines
    assert "  NOT RUN: 3 host tests, because no ComfyUI was found" in lines
    assert lines[-1] == "5 passed, 0 failed"


def test_host_tests_can_be_counted_without_a_comfyui(tools):
    environment = tools["environment"].Environment(ROOT / ".venv")
    if Path(sys.prefix).resolve() != environment.folder.resolve():
        environment = tools["environment"].Environment(Path(sys.prefix))
    report = tools["testing"]._count_host_tests(environment, [str(ROOT / "tests" / "host")], ROOT)
    assert report.code == 0 and sum(report.not_run.values()) > 0
