"""Seeds that depend on the computation, not its place: every cut of a model draws the same."""

import hashlib


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed of one layer's forward pass, 63 bits; the same in every process."""
    return _hashed(f"{seed} {step} {microbatch} {layer}")


def operator_seed(seed: int, step: int, name: str) -> int:
    """The seed under which the operator called ``name`` draws in a step, 63 bits."""
    return _hashed(f"{seed} {step} {name}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
