"""What several functions ask of their arguments, with one wording."""

from __future__ import annotations


def whole_number(least: int = 1, **arguments) -> None:
    """ValueError that names the first argument that is no whole number of at least `least`."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise ValueError(f"{name}={value!r}; legal is a whole number of at least {least}")
