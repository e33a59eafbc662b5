"""The two fields of a layer's document that have more than one spelling."""


def layer_minimum(layer):
    """Samples below which the layer cannot run."""
    return layer.get("min_samples", 1)


def update_seconds(layer, kind):
    """Seconds of the optimizer's step of one layer on one device kind."""
    for entry in layer["costs"]:
        if entry.get("device_kind") in (None, kind) and "update_seconds" in entry:
            return entry["update_seconds"]
    return 0


UPDATE_FIELD = "update_seconds"
