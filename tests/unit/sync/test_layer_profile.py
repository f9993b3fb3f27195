"""A profile of layers as a file: read as written, or refused in one line."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft_plugins.base.intake import FILE_LIMIT
from ft_plugins.errors import ConfigError
from ft_plugins.sync.layers.layer_profile import MOST_LAYERS, LayerProfile, LayerTimes, read_profile, write_profile
from harness.hostile import altered, damaged

PROFILE = LayerProfile((LayerTimes("embedding", 0.001, 0.002, 0.5, 10**9), LayerTimes("h.0", 0, 1 / 3, 0.25, 7)), 8)
MANY = settings(derandomize=True, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
RANDOM = st.randoms(use_true_random=False)


def refused(path):
    """What a file was refused with; '' if it was not."""
    try:
        read_profile(path)
    except ConfigError as error:
        line = str(error)
        assert line.isprintable() and len(line) < 500 and line.startswith(f"{path}: ")
        return line
    return ""


def test_a_profile_is_read_as_it_was_written(tmp_path):
    write_profile(PROFILE, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == PROFILE
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["version"] == 1 and found["replicas"] == 8
    assert found["layers"][1] == {
        "name": "h.0", "forward_seconds": 0, "backward_seconds": 1 / 3, "communication_seconds": 0.25, "bytes": 7,
    }  # fmt: skip


def test_the_largest_profile_fits_into_the_bound_of_a_file(tmp_path):
    layers = [LayerTimes(f"model.decoder.layers.{i}", 1 / 3, 1 / 7, 1 / 9, 10**10 + i) for i in range(MOST_LAYERS)]
    write_profile(LayerProfile(tuple(layers), 8), tmp_path / "p.json")
    assert len(read_profile(tmp_path / "p.json")) == MOST_LAYERS
    assert (tmp_path / "p.json").stat().st_size < FILE_LIMIT


@given(RANDOM)
@MANY
def test_any_file_is_a_profile_or_a_line(tmp_path, source):
    path = tmp_path / "p.json"
    content = json.dumps(altered(PROFILE.block(), source)).encode()
    path.write_bytes(source.choice([content, damaged(content, source)]))
    if not refused(path):
        assert read_profile(path).compute_ns >= 0


def changed(key, value, layer=True):
    block = PROFILE.block()
    (block["layers"][1] if layer else block)[key] = value
    return json.dumps(block).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a profile of layers of version 1 (Expecting value"),
        (changed("version", 2, layer=False), "version: Input should be 1, found 2"),
        (changed("replicas", 1, layer=False), "replicas: Input should be greater than or equal to 2, found 1"),
        (changed("layers", [], layer=False), "layers: List should have at least 1 item"),
        (changed("rank", 1, layer=False), "rank: Unexpected keyword argument"),
        (changed("backward_seconds", -1), "layers.1.backward_seconds: Input should be greater than or equal to 0"),
        (changed("backward_seconds", float("nan")), "layers.1.backward_seconds: Input should be a finite number"),
        (changed("backward_seconds", 1e300), "layers.1.backward_seconds: Input should be less than or equal to 10000"),
        (changed("bytes", -1), "layers.1.bytes: Input should be greater than or equal to 0"),
        (changed("name", "embedding"), "layer 1 ('embedding'): the name of an earlier layer"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(tmp_path, content, said):
    path = tmp_path / "p.json"
    path.write_bytes(content)
    assert said in refused(path)


def test_what_is_no_file_of_bounded_size_is_refused(tmp_path):
    assert "cannot be read (No such file" in refused(tmp_path / "none.json")
    os.mkfifo(tmp_path / "pipe")
    assert "it is not a regular file" in refused(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * (FILE_LIMIT + 1))
    assert f"it has more than {FILE_LIMIT} bytes" in refused(tmp_path / "large")


def test_a_profile_of_another_model_is_refused():
    PROFILE.require_names(["embedding", "h.0"])
    for names, said in (
        (["embedding", "h.1"], "expected 'h.1', found 'h.0' as layer 1"),
        (["embedding"], "expected 1 layers, found 2 layers"),
        ([], "expected 0 layers, found 2 layers"),
    ):
        with pytest.raises(ConfigError, match="profile of another model") as error:
            PROFILE.require_names(names)
        assert said in str(error.value)
