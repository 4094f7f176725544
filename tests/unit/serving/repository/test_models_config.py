"""TensorFlow Serving's models.config, read once and again."""

from __future__ import annotations

import logging
import pathlib
import sys

import pytest
from tiny_models import numbers, saved_model, settled, tick

from nanotf.errors import InvalidArgumentError
from nanotf.serving.repository import (
    ALL,
    LATEST,
    ConfigFile,
    Repository,
    Source,
    VersionPolicy,
    models_config,
)

# As the pages of TensorFlow Serving have it, with the ways to write text protos mixed.
TEXT = """
# Models of the shop.
model_config_list: {
  config {
    name: 'first'
    base_path: "/models/first"
    model_platform: 'tensorflow'
  }
  config <
    name: "second" base_path: '/models/' 'second';
    model_version_policy { specific { versions: 42 versions: 43 } }
    version_labels { key: 'stable' value: 42 }
    version_labels { key: 'canary', value: 43 }
  >
  config { name: 'third' base_path: '/m/3' model_version_policy: { latest: { num_versions: 2 } } }
  config { name: 'fourth' base_path: '/m/4' model_version_policy { all {} } }
  config { name: 'fifth' base_path: '/m/5' model_version_policy { latest {} } }
  config { name: 'sixth' base_path: '/m/6' model_version_policy { specific { versions: [1, 2] } } }
}
"""


def _config(folder: pathlib.Path, text: str) -> pathlib.Path:
    tick(folder)
    path = folder / "models.config"
    path.write_text(text)
    return path


def _models(*models: tuple[str, pathlib.Path]) -> str:
    each = [f"config {{ name: '{name}' base_path: '{path}' }}" for name, path in models]
    return f"model_config_list {{ {' '.join(each)} }}"


def test_all_that_a_config_says(tmp_path: pathlib.Path) -> None:
    first, second, third, fourth, fifth, sixth = ConfigFile(_config(tmp_path, TEXT)).sources()
    assert first == Source("first", pathlib.Path("/models/first"), policy=LATEST)
    assert second.path == pathlib.Path("/models/second")
    assert second.policy == VersionPolicy(only=frozenset([42, 43]))
    assert second.labels == (("stable", 42), ("canary", 43))
    assert third.policy == VersionPolicy(limit=2)
    assert (fourth.policy, fifth.policy) == (ALL, LATEST)
    assert sixth.policy == VersionPolicy(only=frozenset([1, 2]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "model_config_list"),
        ("model_config_list { config {", "ModelServerConfig .*Received"),
        ("model_config_list { config { nane: 'a' } }", 'no field named "nane"'),
        ("model_config_list { config { name: 'a' base_path: 'm' } }", "absolute path"),
        ("model_config_list { config { name: 'a' base_path: 'gs://b/m' } }", "absolute path"),
        ("model_config_list { config { base_path: '/m' } }", "name of a model .*models.config"),
        ("model_config_list { config { name: 'a/b' base_path: '/m' } }", "name of a model"),
        (_models(("a", pathlib.Path("/x")), ("a", pathlib.Path("/y"))), "name of its own"),
        (
            "model_config_list { config { name: 'a' base_path: '/m' model_platform: 'x' } }",
            "model_platform must be 'tensorflow'",
        ),
        (
            "model_config_list { config { name: 'a' base_path: '/m' model_version_policy "
            "{ specific {} } } }",
            "must name versions",
        ),
        ("model_config_list { config { name: 'a' logging_config {} } }", "logging_config"),
        ("model_config_list { config { name: '\\377' } }", "Received"),
    ],
)
def test_a_config_that_cannot_be_used(tmp_path: pathlib.Path, text: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        ConfigFile(_config(tmp_path, text))


def test_a_config_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--config must be a file"):
        ConfigFile(tmp_path / "nothing")
    with pytest.raises(InvalidArgumentError, match="--config must be a file"):
        ConfigFile(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgumentError, match="as text"):
        ConfigFile(tmp_path / "binary")


def test_without_protobuf(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_config._message_class.cache_clear()
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(InvalidArgumentError, match="pip install protobuf"):
        ConfigFile(_config(tmp_path, TEXT))


def test_a_changed_config_is_the_whole_truth(tmp_path: pathlib.Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        saved_model(folder / "1")
        saved_model(folder / "2")
    repository = Repository([], [ConfigFile(_config(tmp_path, _models(("a", a))))])
    assert {(v.model, v.number) for v in settled(repository).versions} == {("a", 2)}
    _config(
        tmp_path,
        f"model_config_list {{ config {{ name: 'b' base_path: '{b}' model_version_policy "
        "{ specific { versions: 1 } } version_labels { key: 'stable' value: 1 } } }",
    )
    assert repository.models == ["a"]
    repository.look()
    assert repository.look().labels == {("b", "stable"): 1}
    wanted = repository.look()
    assert {(v.model, v.number) for v in wanted.versions} == {("b", 1)}
    assert repository.default_model == "b"
    _config(tmp_path, "model_config_list {}")
    assert settled(repository).versions == frozenset()


def test_a_model_that_moves_is_served_all_the_time(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "a" / "1")
    saved_model(tmp_path / "b" / "2")
    repository = Repository([], [ConfigFile(_config(tmp_path, _models(("m", tmp_path / "a"))))])
    assert numbers(settled(repository)) == [1]
    _config(tmp_path, _models(("m", tmp_path / "b")))
    assert [numbers(repository.look()) for _ in range(3)] == [[1], [1], [2]]
    _config(tmp_path, _models(("m", tmp_path / "nothing")))
    assert [numbers(repository.look()) for _ in range(4)] == [[2]] * 4


def test_another_policy_takes_effect_at_once(tmp_path: pathlib.Path) -> None:
    saved_model(tmp_path / "m" / "1")
    saved_model(tmp_path / "m" / "2")
    config = (
        "model_config_list {{ config {{ name: 'm' base_path: '{}' model_version_policy {} }} }}"
    )
    path = _config(tmp_path, config.format(tmp_path / "m", "{ all {} }"))
    repository = Repository([], [ConfigFile(path)])
    assert numbers(settled(repository)) == [1, 2]
    _config(tmp_path, config.format(tmp_path / "m", "{ specific { versions: 1 } }"))
    assert [numbers(repository.look()) for _ in range(2)] == [[1, 2], [1]]


def test_a_config_that_breaks_changes_nothing(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_model(tmp_path / "a" / "1")
    path = _config(tmp_path, _models(("a", tmp_path / "a")))
    repository = Repository([], [ConfigFile(path)])
    wanted = settled(repository)
    for text in ("model_config_list { config { na", "", None):
        caplog.clear()
        if text is None:
            path.unlink()
        else:
            _config(tmp_path, text)
        with caplog.at_level(logging.WARNING, "nanotf"):
            assert [repository.look() for _ in range(4)] == [wanted] * 4
        (line,) = {record.getMessage() for record in caplog.records}
        assert line.startswith(f"{path}: The models stay as they were.")
    saved_model(tmp_path / "b" / "7")
    _config(tmp_path, _models(("b", tmp_path / "b")))
    repository.look()
    assert numbers(settled(repository)) == [7]


def test_a_config_and_other_models(tmp_path: pathlib.Path) -> None:
    config = ConfigFile(_config(tmp_path, _models(("a", tmp_path / "a"))))
    repository = Repository([Source("b", tmp_path / "b")], [config])
    assert repository.models == ["b", "a"]
    _config(tmp_path, _models(("b", tmp_path / "a")))
    repository.look()
    repository.look()
    assert repository.models == ["b", "a"]
