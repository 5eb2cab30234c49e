"""The environment variables of gkd."""

from pathlib import Path

import pytest

from gkd.env import Environment, read_env
from gkd.errors import EnvError


def test_unset_variables_have_defaults() -> None:
    assert read_env({"XDG_CACHE_HOME": "/var/cache/me"}) == Environment(
        cache_dir=Path("/var/cache/me/gkd-engines"), assert_cached=False, sync=False, gpu_device=None
    )


def test_values_are_taken() -> None:
    variables = {"GKD_CACHE_DIR": "/srv/kernels", "GKD_ASSERT_CACHED": "1", "GKD_SYNC": "0", "GKD_GPU_DEVICE": "3"}
    assert read_env(variables) == Environment(
        cache_dir=Path("/srv/kernels"), assert_cached=True, sync=False, gpu_device=3
    )


def test_an_empty_value_counts_as_unset() -> None:
    names = ("GKD_CACHE_DIR", "GKD_ASSERT_CACHED", "GKD_SYNC", "GKD_GPU_DEVICE")
    assert read_env(dict.fromkeys(names, "")) == read_env({})


@pytest.mark.parametrize("user_cache", ["", "relative/cache"])
def test_the_cache_lies_in_the_home_of_a_user_without_an_absolute_xdg_directory(
    user_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert read_env({"XDG_CACHE_HOME": user_cache}).cache_dir == Path("/home/me/.cache/gkd-engines")


def test_the_cache_can_be_switched_off() -> None:
    assert read_env({"GKD_CACHE_DIR": "off"}).cache_dir is None


def test_a_relative_cache_directory_stays_where_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_env({"GKD_CACHE_DIR": "kernels"}).cache_dir == tmp_path / "kernels"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GKD_SYNC", "yes"),
        ("GKD_SYNC", "2"),
        ("GKD_ASSERT_CACHED", "true"),
        ("GKD_GPU_DEVICE", "-1"),
        ("GKD_GPU_DEVICE", "cuda:0"),
        ("GKD_GPU_DEVICE", "²"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str) -> None:
    with pytest.raises(EnvError) as caught:
        read_env({name: value})
    assert name in str(caught.value) and f"`{value}`" in str(caught.value)
