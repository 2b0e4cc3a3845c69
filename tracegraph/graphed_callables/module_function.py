"""ModuleFunction: the call of a module that is a tree, as a function that takes the module.

A number of Python in a module (a rate, or whether it is in training) is static, as it is for
equinox: it belongs to the structure of the tree.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

_NUMBERS = (bool, int, float, complex)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Fixed:
    """What stands for a number of Python in a module.

    Attributes:
        kind: equal numbers may be of different kinds.
        value: the number.
    """

    kind: type
    value: Any


class ModuleFunction:
    """The function of a module's class, which takes a module whose numbers are fixed.

    Args:
        function: `__call__` of the module's class.

    Attributes:
        function: the same.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function, updated=())

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; it is traced."""
        free = jax.tree.map(_free, module, is_leaf=lambda x: isinstance(x, Fixed))
        return self.function(free, *args, **kwargs)


def fix_numbers(module: Any) -> Any:
    """Returns a module with its numbers of Python fixed.

    Example:
        >>> jax.tree.leaves(fix_numbers({"rate": 0.5, "w": jnp.float32(2)}))
        [Array(2., dtype=float32)]
    """
    return jax.tree.map(lambda x: Fixed(type(x), x) if type(x) in _NUMBERS else x, module)


def _free(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Fixed) else leaf
