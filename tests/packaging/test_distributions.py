"""The archives of a release are complete and agree; the wheel installs what the README promises."""

from __future__ import annotations

import email.message
import email.parser
import json
import os
import pathlib
import re
import shlex
import sys
import sysconfig
import tarfile
import zipfile

import pytest
from rattler_build import Stage0Recipe, VariantConfig
from release import (
    ROOT,
    Distributions,
    Installation,
    build_environment,
    copy,
    install,
    run,
    tracked,
)

import nanotf

LIBRARIES = {"nanotf/collectives/_shm.so", "nanotf/collectives/_ops.so"}
DOCKERFILE = ROOT / "packaging/docker/Dockerfile"
RECIPE = ROOT / "packaging/conda/recipe.yaml"
SCRIPTS = ("nanotf", "nanotf-init", "nanotf-unset")

TRAINING = """
import json
import numpy as np
import nanotf
import tensorflow as tf

model = nanotf.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
history = model.fit(x, x.sum(1), epochs=3, num_processes=2, verbose=0)
print(json.dumps([nanotf.__file__, nanotf.worker_pids(), history.history["loss"]]))
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The source distribution, built from a copy of this clone, and the wheel, built from it."""
    source = tmp_path_factory.mktemp("source")
    copy(tracked(), source)
    out = tmp_path_factory.mktemp("distributions")
    quick = build_environment(CXXFLAGS="-O0")  # to compile; no test here is about speed
    run(sys.executable, "-m", "build", "--outdir", out, source, env=quick)
    (sources,) = out.glob("nanotf-*.tar.gz")
    (wheel,) = out.glob("nanotf-*.whl")
    return Distributions(sources, wheel)


@pytest.fixture(scope="module")
def installed(
    distributions: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    """A clean environment with the wheel, its requirements, and no TensorFlow."""
    return install(distributions.wheel, tmp_path_factory.mktemp("clean") / "venv")


def _metadata(wheel: pathlib.Path) -> email.message.Message:
    text = zipfile.ZipFile(wheel).read(f"nanotf-{nanotf.__version__}.dist-info/METADATA")
    return email.parser.Parser().parsestr(text.decode())


def _package_files() -> set[str]:
    """Returns the files of the package, without those that configure a tool."""
    return {name for name in tracked("nanotf") if not pathlib.Path(name).name.startswith(".")}


def test_sources_contain_all_files_of_a_build(distributions: Distributions) -> None:
    with tarfile.open(distributions.sources) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    documents = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "setup.py"}
    needed = {*_package_files(), *tracked("scripts", "packaging/*.py"), *documents}
    assert needed - names == set()
    assert {name for name in names if name.endswith(".so")} == set()


def test_wheel_holds_the_package_and_no_tests(distributions: Distributions) -> None:
    """Each module, stub and native source, the libraries, the scripts, and nothing else."""
    names = {name for name in zipfile.ZipFile(distributions.wheel).namelist() if name[-1] != "/"}
    about, data = (f"nanotf-{nanotf.__version__}.{end}/" for end in ("dist-info", "data"))
    package = {name for name in names if not name.startswith((about, data))}
    assert package == _package_files() | LIBRARIES
    assert "nanotf/py.typed" in package
    scripts = {name.removeprefix(data) for name in names if name.startswith(data)}
    assert scripts == {"scripts/nanotf-init", "scripts/nanotf-unset"}
    assert f"{about}licenses/LICENSE" in names


def test_wheel_serves_every_python_of_the_platform(distributions: Distributions) -> None:
    assert re.fullmatch(r"nanotf-[\d.]+-py3-none-linux_\w+\.whl", distributions.wheel.name)


def test_version_is_the_same_everywhere(distributions: Distributions) -> None:
    """In the package, both archives, the conda recipe, and the newest release of the changelog."""
    headings = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = {
        "archive": distributions.sources.name.removeprefix("nanotf-").removesuffix(".tar.gz"),
        "wheel": _metadata(distributions.wheel)["Version"],
        "recipe": _recipe()["package"]["version"],
        "changelog": headings[0] if headings else None,
    }
    assert versions == dict.fromkeys(versions, nanotf.__version__)


def test_description_renders(distributions: Distributions) -> None:
    said = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *distributions)
    assert said.count("PASSED") == 2


def test_links_of_the_description_are_absolute(distributions: Distributions) -> None:
    """They lead to files of the repository, at the version's tag."""
    about = _metadata(distributions.wheel)
    urls = dict(line.split(", ") for line in about.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= set(urls)
    links = re.findall(r"\]\(([^)\s]+)\)", about.get_payload())
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    to_files = re.compile(rf"{urls['Source']}/(?:blob|raw)/v{nanotf.__version__}/([^#]+)")
    files = [found[1] for link in links if (found := to_files.match(link))]
    assert len(files) > 5
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_extras_are_offered(distributions: Distributions) -> None:
    offered = set(_metadata(distributions.wheel).get_all("Provides-Extra", []))
    assert {"cpu", "gpu", "intel", "ray", "plot", "docs"} <= offered


@pytest.mark.thorough
@pytest.mark.timeout(1200)  # seconds; zig compiles its C library and its C++ library first
def test_release_wheel_runs_on_old_systems_without_a_compiler(
    installed: Installation, tmp_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`make dist` makes a manylinux2014 wheel that needs no C++ library.

    It uses the vector instructions that a library compiled here uses: zig's own detection of the
    CPU is a stub.
    """
    environment = build_environment(PYTHON=sys.executable, TOOLS=str(tmp_path / "tools"))
    said = run(ROOT / "tools/build-dist", tmp_path / "dist", seconds=1100, env=environment)
    assert said.count("PASSED") == 2
    (wheel,) = (tmp_path / "dist").glob("nanotf-*manylinux*.whl")
    assert "manylinux_2_17" in wheel.name
    place = install(wheel, tmp_path_factory.mktemp("release") / "venv")
    code = (
        "import json, psutil\n"
        "from nanotf.collectives.native_library import native_status\n"
        "status = native_status()\n"
        "print(json.dumps([status, [m.path for m in psutil.Process().memory_maps()]]))"
    )
    status, mapped = json.loads(run(place.python, "-c", code, cwd=tmp_path))
    here, _ = json.loads(run(installed.python, "-c", code, cwd=tmp_path))
    assert status == here
    assert status[0], status[1]
    names = {pathlib.Path(path).name for path in mapped}
    assert "_shm.so" in names
    assert {name for name in names if name.startswith(("libstdc++", "libgomp"))} == set()


def _instructions() -> list[tuple[str, str]]:
    """Returns the Dockerfile's instructions: name, arguments."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line.strip()]


def test_entry_point_of_the_image_sources_nanotf_init(
    installed: Installation, tmp_path: pathlib.Path
) -> None:
    given = dict(_instructions())
    command = [*json.loads(given["ENTRYPOINT"]), *json.loads(given["CMD"])]
    code = "import os; print(os.environ['NANOTF_ENV'])"
    said = run(*command, "-c", code, cwd=tmp_path, env=installed.environment)
    assert said.strip()


@pytest.mark.thorough
def test_image_copies_all_files_of_its_wheel(
    distributions: Distributions, tmp_path: pathlib.Path
) -> None:
    """The Dockerfile's first stage, run here on the files that it copies, makes the same wheel."""
    copied, wheels, commands = [], tmp_path / "wheels", []
    for name, arguments in _instructions():
        if name == "COPY":
            copied += tracked(*arguments.split()[:-1])
        elif name == "RUN" and "pip wheel" in arguments:
            commands.append(arguments.replace("/wheels", shlex.quote(str(wheels))))
    copy(copied, tmp_path / "source")
    (command,) = commands
    path = f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"
    run("bash", "-c", command, cwd=tmp_path / "source", env=build_environment(PATH=path))
    (wheel,) = wheels.glob("*.whl")
    assert wheel.name == distributions.wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(names) == sorted(zipfile.ZipFile(distributions.wheel).namelist())


def _recipe() -> dict:
    """Returns the conda recipe as rendered for this platform, after rattler-build's checks."""
    variants = VariantConfig.from_file(RECIPE.with_name("variants.yaml"))
    rendered = Stage0Recipe.from_file(RECIPE).render(variants)
    pythons = [each.variant["python"] for each in rendered]
    assert pythons == ["3.10.*", "3.11.*", "3.12.*", "3.13.*"]
    return rendered[0].recipe.to_dict()


def test_conda_recipe_agrees_with_the_metadata(distributions: Distributions) -> None:
    recipe, about = _recipe(), _metadata(distributions.wheel)
    required = [each for each in about.get_all("Requires-Dist", []) if "extra ==" not in each]
    (tensorflow,) = (
        each.partition(";")[0].replace("tensorflow-cpu", "tensorflow")
        for each in about.get_all("Requires-Dist", [])
        if each.endswith('extra == "cpu"')
    )
    wanted = {_bounds(each) for each in (*required, tensorflow, "python")}
    assert {_bounds(each) for each in recipe["requirements"]["run"]} == wanted
    described = recipe["about"]
    assert described["license"] == about["License-Expression"]
    assert described["summary"] == about["Summary"]


def _bounds(requirement: str) -> tuple[str, frozenset[str]]:
    """Splits "psutil >=5.9" into the name and the bounds of its version."""
    name, versions = re.fullmatch(r"([\w-]+)\s*(.*?)\s*", requirement).groups()
    return name, frozenset(filter(None, versions.split(",")))


# ---------------------------------------------------------------------------- installed
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_on_the_path(
    installed: Installation, script: str, tmp_path: pathlib.Path
) -> None:
    found = run("bash", "-c", f"command -v {script}", env=installed.environment, cwd=tmp_path)
    assert found.strip() == str(installed.python.with_name(script))
    assert os.access(found.strip(), os.X_OK)


def test_command_runs_without_tensorflow(installed: Installation, tmp_path: pathlib.Path) -> None:
    run("nanotf", "--help", env=installed.environment, cwd=tmp_path)


def test_keras_says_which_extra_to_install(installed: Installation, tmp_path: pathlib.Path) -> None:
    code = "import nanotf\ntry:\n    import nanotf.keras\nexcept ImportError as e:\n    print(e)"
    said = run(installed.python, "-c", code, cwd=tmp_path, env=installed.environment)
    assert "nanotf[cpu]" in said
    assert "Received: no module" in said


def _assert_native(place: Installation, folder: pathlib.Path) -> None:
    code = (
        "from nanotf.collectives.native_library import native_status\n"
        "import json\nprint(json.dumps(native_status()))"
    )
    said = run(place.python, "-c", code, cwd=folder, env=place.environment)
    usable, why = json.loads(said)
    assert usable, why


def test_native_library_is_installed_without_a_compiler(
    installed: Installation, tmp_path: pathlib.Path
) -> None:
    _assert_native(installed, tmp_path)


@pytest.mark.thorough
@pytest.mark.timeout(1200)  # seconds; zig compiles its C library and its C++ library first
def test_sources_are_built_without_a_compiler(
    distributions: Distributions, tmp_path: pathlib.Path
) -> None:
    """pip installs ziglang for the time of the build."""
    place = install(distributions.sources, tmp_path / "venv", seconds=1100)
    _assert_native(place, tmp_path)


@pytest.mark.thorough
def test_two_workers_train_with_the_wheel(installed: Installation, tmp_path: pathlib.Path) -> None:
    """With this environment's TensorFlow, and the wheel's nanotf before the one installed here."""
    (packages,) = (installed.python.parents[1] / "lib").glob("python*/site-packages")
    borrowed = packages / "borrowed.pth"
    borrowed.write_text(f"{sysconfig.get_path('purelib')}\n")
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    try:
        said = run(installed.python, script, cwd=tmp_path, env=installed.environment)
    finally:
        borrowed.unlink()
    where, pids, losses = json.loads(said.splitlines()[-1])
    assert pathlib.Path(where).is_relative_to(packages)
    assert len(set(pids)) == 2
    assert losses[-1] < losses[0]
