"""Plan: every valid layout ranked by the cost model, and why the others fall out.

The package can be called: `trimaran.plan(...)` is `trimaran.api.plan(...)`, so that the Python API has the
command line's words although the room has the verb's name.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimaran.plan.noun import Plan


class _CallablePackage(ModuleType):
    """This package, which plans when it is called."""

    def __call__(self, *arguments: Any, **options: Any) -> Plan:
        """See trimaran.api.plan."""
        from trimaran.api import plan

        return plan(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
