"""An address at which no Ray listens is told at once, without Ray's own tries and log."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from trimaran.bench.launch.ray import ray_cluster
from trimaran.bench.launch.ray.ray_cluster import RayCluster
from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.ray_settings import RaySettings


@pytest.mark.parametrize("written", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "[::1]:{port}", "nowhere.invalid:1"])
def test_an_address_without_a_listener_is_told_at_once(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "require_ray", lambda: None)
    with socket.socket() as bound:  # bound, and not listening: nobody else can take the port meanwhile
        bound.bind(("127.0.0.1", 0))
        address = written.format(port=bound.getsockname()[1])
        with pytest.raises(TrimaranError) as refused:
            RayCluster(RaySettings(address=address))
    assert f"no Ray answers at {address}" in str(refused.value) and "correct sweep.ray.address" in str(refused.value)


def test_what_is_to_be_corrected_is_what_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "require_ray", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", "nowhere.invalid:1")
    for stated, named_by in ((None, "RAY_ADDRESS"), ("elsewhere.invalid:1", "sweep.ray.address")):
        with pytest.raises(TrimaranError, match=rf"{stated or 'nowhere.invalid:1'} .*, or correct {named_by}$"):
            RayCluster(RaySettings(address=stated))


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_listener_that_is_no_ray_is_told_at_once(greeting: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself asked for minutes whether the other program was one."""
    monkeypatch.setattr(ray_cluster, "require_ray", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(greeting)
                connection.recv(64)

        threading.Thread(target=greet, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TrimaranError, match=f"no Ray answers at {address} .what listens there is another program"):
            RayCluster(RaySettings(address=address))


def test_a_ray_that_this_machine_was_last_of_and_that_has_ended_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a head that was killed: Ray itself looked for it there for minutes."""
    monkeypatch.setattr(ray_cluster, "require_ray", lambda: None)
    monkeypatch.setattr(ray_cluster, "_has_head", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text(address)
        with pytest.raises(TrimaranError, match=rf"no Ray answers at {address} .*, since the Ray that this machine"):
            RayCluster(RaySettings())
