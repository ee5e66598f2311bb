"""Numbers of things in messages."""

import re


def amount(number: int, thing: str) -> str:
    """Return a number and what it counts, such as "1 row" or "2 new batches"; thing: one of them."""
    return f"{number} {thing if number == 1 else plural(thing)}"


def plural(thing: str) -> str:
    """Return the regular plural of a noun, or of a phrase that ends in one."""
    if re.search(r"[^aeiou]y$", thing):
        return f"{thing[:-1]}ies"
    return f"{thing}es" if thing.endswith(("s", "x", "ch", "sh")) else f"{thing}s"
