"""RaySettings: which Ray cluster a recipe's ranks are started on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trimaran.nouns.noun import Noun

_Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/\[\]-]{1,200}$")]


class RaySettings(Noun):
    """`[sweep.ray]`: its presence has a recipe's ranks started by Ray.

    A node of the recipe's cluster is a bundle of a placement group, on a Ray node of its own. Where Ray has fewer, as
    an autoscaler starts them when they are asked for, they are waited for.
    """

    address: _Address | None = Field(
        default=None, description="host:port of Ray's head; None: RAY_ADDRESS, or the cluster that this machine is of"
    )
    wait_min: float = Field(default=1.0, gt=0, le=10_080, description="how long nodes are waited for")
