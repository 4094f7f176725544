"""README, documentation site and notebooks agree with the code. Their programs run in e2e/."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pathlib
import re
import runpy
import shutil
import sys

import pytest
from documents import DOCS, NOTEBOOKS, PAGES, README, ROOT, names_in_first_column, python_blocks
from release import run, tracked

import nanotf
from nanotf import errors
from nanotf.cli import main

REFERENCE = DOCS / "reference"
VARIABLE = re.compile(r"NANOTF_[A-Z]+(?:_[A-Z]+)*")
# The site's search, as a browser's worker runs it: prints the first page found for each question.
# Fails where the search warns: of a question, or a word of a heading, that it cannot look up.
SEARCH = """
const [site, ...questions] = process.argv.slice(1);
const fs = require("fs");
const scripts = site + "/assets/javascripts/workers/";
let handle, answer;
globalThis.self = globalThis;
globalThis.addEventListener = (kind, handler) => { handle = handler; };
globalThis.postMessage = (message) => { answer = message; };
console.warn = (...texts) => { console.error(...texts); process.exitCode = 1; };
const [script] = fs.readdirSync(scripts).filter((name) => /^search.*\\.js$/.test(name));
require("vm").runInThisContext(fs.readFileSync(scripts + script, "utf8"));
(async () => {
  const index = JSON.parse(fs.readFileSync(site + "/search/search_index.json", "utf8"));
  await handle({ data: { type: 0, data: { ...index, options: {} } } });
  const words = index.docs.flatMap((entry) => entry.title.toLowerCase().match(/[a-z]{3,}/g) || []);
  for (const word of new Set(words)) await handle({ data: { type: 2, data: word } });
  for (const question of questions) {
    await handle({ data: { type: 2, data: question } });
    console.log(answer.data.items[0][0].location.split("#")[0]);
  }
})();
"""
# What users ask, and the page that answers it.
QUESTIONS = {
    "resume after a crash": "how-to/resume/",
    "out of memory in /dev/shm": "how-to/troubleshooting/",
    "mlflow": "how-to/trackers/",
    "which version of Keras": "reference/support/",
    "serve": "how-to/serve/",
    "horovod": "migration/horovod/",
    "nan loss": "how-to/troubleshooting/",
    "how many workers": "how-to/tune/",
    "pytest": "how-to/testing/",
    "docker": "how-to/containers/",
}
# Names of modules, and a version: they have separate pages, or none.
NO_ENTRY = {"__version__", "data", "errors", "estimator", "inference", "keras", "optimizers"}
NO_ENTRY |= {"layers", "smp", "hvd", "elastic"}


def test_readme_has_at_most_900_words() -> None:
    assert len(README.read_text().split()) <= 900


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", README.read_text())
    assert len(links) > 15
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda path: path.stem)
def test_python_fragments_parse(page: pathlib.Path) -> None:
    for _, code in python_blocks(page):
        ast.parse(code)


def test_every_example_is_named() -> None:
    """In the README or on a page, by its path."""
    texts = "\n".join(path.read_text() for path in (README, *PAGES))
    scripts = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert len(scripts) > 4
    assert [name for name in scripts if f"examples/{name}" not in texts] == []


def _read_variables() -> set[str]:
    """Returns the environment variables that sources of nanotf name as a whole string."""
    found = set()
    for path in (ROOT / "setup.py", *(ROOT / "nanotf").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if VARIABLE.fullmatch(node.value) else set()
    for path in (ROOT / "nanotf").rglob("*.cc"):
        found |= set(re.findall(r'getenv\("(NANOTF_[A-Z_]+)"\)', path.read_text()))
    return found


def test_table_of_variables_is_complete() -> None:
    page = (REFERENCE / "environment-variables.md").read_text()
    listed = {n for n in names_in_first_column(page) if n.startswith("NANOTF_")}
    assert listed == _read_variables()


def test_help_of_every_command_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site's page has the options of each command and action in the command's section."""
    hook = runpy.run_path(str(ROOT / "tools/command_help.py"))
    page = hook["on_page_markdown"]((REFERENCE / "command-line.md").read_text())
    monkeypatch.setenv("COLUMNS", str(hook["WIDTH"] + 2))

    def help_of(command: str) -> str:
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        return capsys.readouterr().out.strip()

    def parts_of(text: str, title: str) -> list[str]:
        return re.findall(r"^    (\w+)", text.partition(f"{title}:\n")[2], re.MULTILINE)

    commands = parts_of(help_of(""), "commands")
    assert len(commands) > 9
    for command in commands:
        section = page.partition(f"\n## nanotf {command}\n")[2].partition("\n## ")[0]
        text = help_of(command)
        assert text in section
        actions = parts_of(text, "actions")
        assert [action for action in actions if help_of(f"{command} {action}") not in section] == []
        assert bool(actions) == (command in ("jobs", "endpoints"))


def test_pages_show_the_help_of_existing_commands() -> None:
    hook = runpy.run_path(str(ROOT / "tools/command_help.py"))
    with pytest.raises(ValueError, match="nanotf jbos --help"):
        hook["on_page_markdown"]("$ nanotf jbos --help\n")


def test_kubernetes_example_ends_after_its_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Its options exist, and its pods get the time that the server takes to end."""
    text = (ROOT / "examples/kubernetes/serve.yaml").read_text()
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    known = re.findall(r"--[a-z][\w-]*", capsys.readouterr().out)
    given = dict(re.findall(r"^ +- (--[\w-]+)=?(\S*)$", text, re.MULTILINE))
    assert "--drain-delay" in given
    assert set(given) <= set(known)
    (grace,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", text)
    (end,) = re.findall(
        r"^END_SECONDS = ([\d.]+)", (ROOT / "nanotf/serving/front/server.py").read_text(), re.M
    )
    assert int(grace) > int(given["--drain-delay"]) + float(end)


def test_table_of_container_variables_is_complete() -> None:
    listed = names_in_first_column((DOCS / "how-to/containers.md").read_text())
    settings = ROOT / "nanotf/sagemaker/serving/container_settings.py"
    read = set(re.findall(r'"(SAGEMAKER_\w+)"', settings.read_text()))
    assert len(read) > 10
    assert {name for name in listed if name.startswith("SAGEMAKER_")} == read


def test_every_public_name_has_an_entry() -> None:
    entries = set()
    for page in (REFERENCE / "api").glob("*.md"):
        entries |= {
            name.split(".")[-1] for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
        }
    assert (set(nanotf.__all__) | _names_of_keras()) - NO_ENTRY <= entries


def _names_of_keras() -> set[str]:
    """Returns `__all__` of nanotf.keras and of its public modules, without importing TensorFlow."""
    names = set()
    for module in ("__init__", "layers", "optimizers"):
        tree = ast.parse((ROOT / f"nanotf/keras/{module}.py").read_text())
        values = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        assert len(values) == 1, module
        names |= set(ast.literal_eval(values[0]))
    return names


def test_every_exception_is_listed() -> None:
    kinds = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.NanoError)
    }
    listed = names_in_first_column((REFERENCE / "errors.md").read_text())
    assert kinds - {"NanoError"} <= listed
    shown = (REFERENCE / "api/errors.md").read_text()
    assert [name for name in kinds if not re.search(rf"\b{name}\b", shown)] == []


def test_number_of_programs() -> None:
    """The page on exactness says how many programs are compared."""
    texts = [path.read_text() for path in (ROOT / "tests/programs").glob("*.py")]
    count = sum(len(re.findall(r"^@program$", text, re.M)) for text in texts)
    assert f"**{count} programs**" in (DOCS / "explanation/exactness.md").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_of_a_notebook_are_of_its_cells(path: pathlib.Path) -> None:
    """`make notebooks` has run it since its cells last changed."""
    notebook = json.loads(path.read_text())
    digest = runpy.run_path(str(ROOT / "tools/run_notebooks.py"))["digest"]
    assert notebook["metadata"]["nanotf"] == {"outputs_of": digest(notebook)}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in code) >= 3
    assert [cell["execution_count"] for cell in code] == [None] * len(code)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "true"}
    run(sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", folder, cwd=ROOT, env=quiet)
    return folder


@pytest.mark.skipif(shutil.which("node") is None, reason="the site's search is JavaScript")
def test_the_search_of_the_site_finds_the_right_page_first(site: pathlib.Path) -> None:
    found = run("node", "-e", SEARCH, site, *QUESTIONS, cwd=ROOT).splitlines()
    assert dict(zip(QUESTIONS, found, strict=True)) == QUESTIONS


def test_the_site_has_a_page_for_each_notebook(site: pathlib.Path) -> None:
    """Links of other pages to the file lead to that page."""
    linked = (site / "notebooks/index.html").read_text()
    for path in NOTEBOOKS:
        assert "Download this notebook" in (site / f"notebooks/{path.stem}/index.html").read_text()
        assert f'href="{path.stem}/"' in linked
    shown = (site / "notebooks/where_the_time_goes/index.html").read_text()
    assert '<img alt="timeline of all processes" src="data:image/png;base64,' in shown
    assert f"nanotf {nanotf.__version__}, " in shown  # and the date


def test_addresses_are_in_one_place() -> None:
    """In pyproject.toml: a release, and a move, change them there alone."""
    facts = runpy.run_path(str(ROOT / "tools/project_facts.py"))
    places = {url.split("://")[1].rstrip("/") for url in facts["addresses"]().values()}
    assert places
    found = [
        name
        for name in tracked()
        if name != "pyproject.toml" and (ROOT / name).suffix not in {".png", ".ipynb"}
        for text in [(ROOT / name).read_text(errors="replace")]
        if any(place in text for place in places)
    ]
    assert found == []
