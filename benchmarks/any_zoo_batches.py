"""Mini-batches of what models of transformers take."""

import torch

from benchmarks.any_models import (
    CLASSES,
    IMAGE,
    LENGTH,
    TOKENS,
    Batch,
    captioned,
    tokens,
)


def waves(n: int, generator: torch.Generator) -> Batch:
    """Sounds, and the few letters that they say."""
    return {
        "input_values": torch.randn(n, 1200, generator=generator),
        "labels": torch.randint(3, TOKENS, (n, 2), generator=generator),
    }


def spectra(n: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(CLASSES, (n,), generator=generator)
    return {"input_values": torch.randn(n, 32, 16, generator=generator), "labels": labels}


def pictured(n: int, generator: torch.Generator) -> Batch:
    """Text after an image of 16 tokens."""
    written = tokens(n, generator)
    ids = torch.cat([torch.full((n, 16), TOKENS - 1), written.clamp(max=TOKENS - 2)], dim=1)
    pixels = torch.randn(n, 3, IMAGE, IMAGE, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone()}


def described(n: int, generator: torch.Generator) -> Batch:
    """Text about an image."""
    found = captioned(n, generator)
    assert isinstance(found, dict)
    return {**found, "labels": found["input_ids"].clone()} if found.pop("return_loss") else found


def questions(n: int, generator: torch.Generator) -> Batch:
    """Text about an image, and the scores of answers."""
    found = captioned(n, generator)
    assert isinstance(found, dict)
    del found["return_loss"]
    return {**found, "labels": torch.rand(n, CLASSES, generator=generator)}


def hidden_patches(n: int, generator: torch.Generator) -> Batch:
    """Images of which half of the patches, in a given order, are to be found."""
    pixels = torch.randn(n, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "noise": torch.rand(n, 16, generator=generator)}


def series(n: int, generator: torch.Generator) -> Batch:
    values = torch.randn(n, 16, 2, generator=generator)
    return {"past_values": values, "future_values": torch.randn(n, 4, 2, generator=generator)}


def dated(n: int, generator: torch.Generator) -> Batch:
    """One series each, its features of time, and what is observed."""
    past, future = 23, 4
    return {
        "past_values": torch.rand(n, past, generator=generator),
        "past_time_features": torch.rand(n, past, 2, generator=generator),
        "past_observed_mask": torch.ones(n, past),
        "future_values": torch.rand(n, future, generator=generator),
        "future_time_features": torch.rand(n, future, 2, generator=generator),
    }


def long_text(n: int, generator: torch.Generator) -> Batch:
    found = tokens(n, generator, 16)
    return {"input_ids": found, "labels": found.clone()}


def long_translation(n: int, generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(n, generator, 16), "labels": tokens(n, generator, LENGTH // 2)}
