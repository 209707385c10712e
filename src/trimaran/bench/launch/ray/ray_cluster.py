"""A connection to Ray, and the nodes that it gives: a placement group of one bundle a node, an actor in each.

Ray is imported when a connection is made, and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from trimaran.bench.launch.contract import Say
from trimaran.bench.launch.ray.node import RayNode
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.wishes import stop_signals
from trimaran.recipe.ray_settings import RaySettings

_ANSWERS_WITHIN_S = 2.0
_ASK_EVERY_S = 1  # Ray takes whole seconds
_READY_WITHIN_S = 120.0
_ENDED_WITHIN_S = 5.0
# How a client of HTTP/2 begins: its preface, and settings of which none is stated.
_SETTINGS, _FRAME_HEAD_BYTES = 4, 9
_HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
_HEARS_SIGNALS_EVERY_S = 0.25


class NodeLostError(Exception):
    """An actor does not answer: its process or its node has ended. `out_of_memory`: Ray ended it for that."""

    def __init__(self, *, out_of_memory: bool = False) -> None:
        super().__init__(out_of_memory)
        self.out_of_memory = out_of_memory


class StillRunsError(Exception):
    """An actor has not answered yet."""


@dataclass(frozen=True)
class NodePlace:
    """A node of Ray's: the number that it has for as long as it lives, what people call it, where it is."""

    number: str
    name: str
    address: str
    port: int

    def answers(self) -> bool:
        """Whether Ray's process of the node takes connections, which Ray itself finds out after a while."""
        try:
            socket.create_connection((self.address, self.port), _ANSWERS_WITHIN_S).close()
        except OSError:
            return False
        return True


def require_ray() -> None:
    """Raise TrimaranError unless Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        raise TrimaranError("[sweep.ray] needs Ray, which is not installed: pip install 'trimaran[ray]'")


def _no_ray(address: str, named_by: str, reason: str) -> TrimaranError:
    return TrimaranError(
        f"no Ray answers at {address} ({reason[:200]}): start its nodes (`ray start`) and run this on one of them, or "
        f"correct {named_by}"
    )


def _require_listener(address: str, named_by: str) -> None:
    """Raise TrimaranError where no Ray listens at a host and port: Ray itself would ask for minutes, in many lines."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdecimal()):
        return  # `auto` and the like, which Ray finds by itself
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_WITHIN_S) as connection:
            speaks = "RAY_USE_TLS" in os.environ or _speaks_grpc(connection)
    except (OSError, OverflowError, UnicodeError) as error:
        raise _no_ray(address, named_by, str(error)) from None
    if not speaks:
        raise _no_ray(address, named_by, "what listens there is another program")


def _last_joined() -> str:
    """The address of the Ray that this machine was last made a node of, which `auto` then means; empty without one."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        return Path(folder, "ray", "ray_current_cluster").read_text(errors="replace").strip()
    return ""


def _has_head() -> bool:
    """Whether a head of Ray's runs on this machine, which `auto` finds whatever was noted last."""
    names = set[str]()
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            names.add(file.read_text(errors="replace").strip())
    return "gcs_server" in names


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether a peer answers as servers of gRPC do, Ray's among them: a server of HTTP/2 first sends its settings.

    RFC 9113, 3.4 and 4.1: a frame begins with three bytes of its length and one of its type, which is 4 of settings.
    """
    connection.sendall(_HTTP_2)
    try:
        head = connection.recv(_FRAME_HEAD_BYTES, socket.MSG_WAITALL)
    except TimeoutError:
        return False
    return len(head) == _FRAME_HEAD_BYTES and head[3] == _SETTINGS


class RayCluster:
    """A connection to Ray, as which this process is one of Ray's jobs: what it holds there ends with it."""

    def __init__(self, settings: RaySettings) -> None:
        """Connect. Raises TrimaranError where Ray is not installed, or not there."""
        require_ray()
        stated = os.environ.get("RAY_ADDRESS")
        address = settings.address or stated or "auto"
        named_by = "RAY_ADDRESS" if stated and not settings.address else "sweep.ray.address"
        _require_listener(address, named_by)
        if address == "auto" and not _has_head():
            _require_listener(
                _last_joined(), "sweep.ray.address, since the Ray that this machine was last of has ended"
            )
        with _own_signals():
            import ray
            import ray.util.scheduling_strategies

            self._ray: Any = ray
            self._connected_here = not ray.is_initialized()
            if self._connected_here:
                try:
                    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
                except (ConnectionError, RuntimeError, ValueError) as error:
                    raise _no_ray(address, named_by, str(error).strip().splitlines()[0]) from None
        self.address = address if address != "auto" else str(ray.get_runtime_context().gcs_address)

    def places(self, bundle: Mapping[str, float]) -> dict[str, NodePlace]:
        """The living nodes that have what a bundle asks for, by their numbers."""
        return {
            node["NodeID"]: _place(node)
            for node in self._ray.nodes()
            if node["Alive"] and all(node["Resources"].get(name, 0.0) >= count for name, count in bundle.items())
        }

    def lives(self, place: NodePlace) -> bool:
        """Whether a node is there, as far as Ray knows, and answers."""
        alive = any(node["Alive"] and node["NodeID"] == place.number for node in self._ray.nodes())
        return alive and place.answers()

    def nodes(
        self, count: int, bundle: Mapping[str, float], wait_s: float, say: Say, environment: Mapping[str, str]
    ) -> RayNodes:
        """So many nodes, waited for. Raises TrimaranError where Ray has not given them by then."""
        group = self._ray.util.placement_group([dict(bundle)] * count, strategy="STRICT_SPREAD")
        try:
            self._wait_for(group, count, bundle, wait_s, say)
            table = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
            known = self.places({})
            bundles = {index: known[number] for index, number in table.items() if number in known}
            if len(bundles) < count:
                raise TrimaranError(f"Ray at {self.address} lost one of its nodes as it gave {count}: run it again")
            return RayNodes(self._ray, group, bundles, bundle, environment)
        except BaseException:
            self._ray.util.remove_placement_group(group)
            raise

    def could_give(self, count: int, bundle: Mapping[str, float], held: Set[str]) -> bool:
        """Whether so many nodes, beside those that are held, stand idle: they are asked for and given back."""
        group = self._ray.util.placement_group([dict(bundle)] * count, strategy="STRICT_SPREAD")
        try:
            given = group.wait(_ASK_EVERY_S) and self._ray.util.placement_group_table(group)["bundles_to_node_id"]
            return bool(given) and held.isdisjoint(given.values())
        finally:
            self._ray.util.remove_placement_group(group)

    def _wait_for(self, group: Any, count: int, bundle: Mapping[str, float], wait_s: float, say: Say) -> None:
        deadline, said = time.monotonic() + wait_s, False
        while not group.wait(_ASK_EVERY_S):
            there = len(self.places(bundle))
            asked = " and ".join(f"{name} {amount:g}" for name, amount in bundle.items())
            if time.monotonic() > deadline:
                raise TrimaranError(
                    f"Ray at {self.address} did not give {count} nodes of {asked} in {wait_s / 60:g} min, {there} are "
                    f"there: start more, end what uses them, or raise sweep.ray.wait_min for an autoscaler"
                )
            if not said:
                said = True
                say(f"waiting for {count} nodes of {asked} of Ray's, {there} are there")

    def close(self) -> None:
        """End the connection, unless whoever called made it."""
        if self._connected_here:
            with _own_signals():
                self._ray.shutdown()


class RayNodes:
    """Nodes that Ray has given, in the order of their names, and the actor on each."""

    def __init__(
        self, ray: Any, group: Any, bundles: Mapping[int, NodePlace], bundle: Mapping[str, float],
        environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        named = sorted(bundles.items(), key=lambda item: (item[1].name, item[1].number))
        self.places = tuple(place for _, place in named)
        self._ray, self._group = ray, group
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        made = ray.remote(RayNode)
        self._actors = [
            made.options(
                num_cpus=bundle.get("CPU", 0.0),
                num_gpus=bundle.get("GPU", 0.0),
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=strategy(placement_group=group, placement_group_bundle_index=index),
            ).remote(place.name, dict(environment))
            for index, place in named
        ]

    def ask(self, node: int, method: str, *arguments: object) -> Any:
        """Call a method of a node's actor; its answer is taken with `answer`."""
        return getattr(self._actors[node], method).remote(*arguments)

    def answer(self, asked: Any, within_s: float = _READY_WITHIN_S) -> Any:
        """What an actor answered. Raises StillRunsError, NodeLostError, or TrimaranError as the actor did."""
        errors = self._ray.exceptions
        try:
            return self._wait_for(asked, within_s)
        except errors.GetTimeoutError:
            raise StillRunsError from None
        except errors.OutOfMemoryError:
            raise NodeLostError(out_of_memory=True) from None
        except errors.ActorDiedError as error:
            if "ModuleNotFoundError" in str(error):
                raise TrimaranError(
                    f"a node of Ray's cannot import Trimaran: install it, of the same version, on every node; "
                    f"{str(error).strip().splitlines()[-1][:200]}"
                ) from None
            raise NodeLostError from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, TrimaranError):
                raise error.cause from None
            raise
        except errors.RayError:
            raise NodeLostError from None

    def close(self) -> None:
        """End the actors, their ranks with them, and give the nodes back."""
        with contextlib.suppress(Exception):  # a cluster that has gone needs no goodbye
            asked = [self.ask(node, "close") for node in range(len(self._actors))]
            with _signals_afterwards():
                self._ray.wait(asked, num_returns=len(asked), timeout=_ENDED_WITHIN_S)
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        with contextlib.suppress(Exception):
            self._ray.util.remove_placement_group(self._group)

    def _wait_for(self, asked: Any, within_s: float) -> Any:
        """What an actor answered, as Ray gives or raises it; signals are heard meanwhile."""
        deadline = time.monotonic() + within_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            with _signals_afterwards():
                try:
                    return self._ray.get(asked, timeout=min(left_s, _HEARS_SIGNALS_EVERY_S))
                except self._ray.exceptions.GetTimeoutError:
                    if left_s <= _HEARS_SIGNALS_EVERY_S:
                        raise


def _place(node: Mapping[str, Any]) -> NodePlace:
    address = str(node["NodeManagerAddress"])
    called = str(node.get("NodeName") or address)
    name = called if called != address else str(node.get("NodeManagerHostname") or address)
    return NodePlace(str(node["NodeID"]), name, address, int(node["NodeManagerPort"]))


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's signal handlers: importing Ray, and connecting, set others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield
    except SystemExit:  # while Ray connects it answers SIGTERM so
        restore()
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        restore()


@contextlib.contextmanager
def _signals_afterwards() -> Iterator[None]:
    """Have this process's signal handlers called at the end of the block.

    What a handler raises while Ray's compiled code waits is heard once it has waited, and then as a SystemError.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in stop_signals()}
    heard: list[tuple[int, FrameType | None]] = []
    try:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, lambda *told: heard.append(told))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for told, frame in heard:
            if callable(handler := before[signal.Signals(told)]):
                handler(told, frame)
