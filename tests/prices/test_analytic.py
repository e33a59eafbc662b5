from dataclasses import replace

import numpy as np
import pytest
from own_rates import own_rates

from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.rates import Reached
from stagewright.graphs.models.chain import load_model, save_model
from stagewright.graphs.models.named import MODELS, named_model

WIDTH = 4  # bytes per element in fp32
PEAKS = own_rates(Reached(matmul=1.0, half_flops=0.0, memory=1.0, launch_seconds=0.0))


def costs(chain):
    return [layer.costs[0] for layer in chain.layers]


def seconds(chain) -> float:
    return sum(cost.forward_seconds + cost.total_backward_seconds for cost in costs(chain))


def millions(name: str, **sizes: int) -> float:
    return sum(layer.parameters for layer in named_model(name).layers(1, sizes)) / 1e6


def gigaflops(name: str, **sizes: int) -> float:
    return sum(layer.flops for layer in named_model(name).layers(1, sizes)) / 1e9


@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [
        # SPP table II, by its precision of a million or ten.
        ("vgg19", 144, 0.5),
        ("resnet152", 60, 0.5),
        ("inception-v3", 24, 0.5),
        ("bert-large", 340, 5),
        ("bert-48", 640, 5),
        # Not SPP's: 65 (Vaswani et al.), and 360 (Yang et al.'s released model).
        ("transformer", 65, 2),
        ("xlnet-large", 360, 1),
        ("vgg16", 138.4, 0.05),
        ("resnet50", 25.6, 0.05),
        ("resnet101", 44.5, 0.05),
        ("densenet121", 7.98, 0.005),
    ],
)
def test_parameters_are_the_published_ones(name, published, tolerance):
    assert millions(name) == pytest.approx(published, abs=tolerance)


def test_the_transformer_of_55_million_parameters_has_a_smaller_vocabulary():
    assert millions("transformer", vocabulary=21_000) == pytest.approx(55, abs=0.5)
    assert millions("transformer", vocabulary=1) == pytest.approx(44.1, abs=0.1)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("vgg19", 24),
        ("resnet101", 37),
        ("resnet152", 54),
        ("densenet121", 65),
        ("inception-v3", 20),
        ("transformer", 15),
        ("bert-large", 27),
        ("bert-48", 51),
        ("bert-72", 75),
        ("xlnet-large", 26),
        ("gpt", 26),
    ],
)
def test_layers(name, layers):
    assert len(analytic_model(name)) == layers


@pytest.mark.parametrize(
    ("name", "published"),
    # Multiply-adds that torchvision lists with its weights, in billions.
    [
        ("vgg16", 15.47),
        ("vgg19", 19.63),
        ("resnet50", 4.09),
        ("resnet101", 7.80),
        ("resnet152", 11.51),
        ("densenet121", 2.83),
        ("inception-v3", 5.71),
    ],
)
def test_multiply_adds_of_image_classifiers(name, published):
    assert gigaflops(name) / 2 == pytest.approx(published, abs=0.01)


def test_gpt_by_its_sizes():
    chain = analytic_model("gpt", 2, layers=3, hidden=64, heads=4, sequence=32, vocabulary=100)
    assert chain.name == "gpt(layers=3,hidden=64,heads=4,sequence=32,vocabulary=100)"
    assert [layer.name for layer in chain.layers] == [
        "embedding", "layer1", "layer2", "layer3", "logits",
    ]  # fmt: skip
    assert costs(chain)[1].output_bytes == 2 * 32 * 64 * WIDTH
    assert chain.layers[0].parameter_bytes == (100 + 32) * 64 * WIDTH


@pytest.mark.parametrize(
    ("attention", "per_score", "per_row"), [("materialized", 5, 0), ("fused", 0, 4)]
)
def test_saved_bytes_of_a_transformer_layer(attention, per_score, per_row):
    # s b h (34 + 5 a s / h) bytes in half precision (Korthikanti et al. 2022, equation 1); a fused
    # kernel keeps a log-sum-exp in fp32 per row in place of the second part.
    sequence, samples, hidden, heads = 128, 4, 256, 8
    chain = analytic_model(
        "gpt", samples, "a100", precision="fp16", attention=attention, layers=1, hidden=hidden,
        heads=heads, sequence=sequence, vocabulary=100,
    )  # fmt: skip
    rows = samples * heads * sequence
    expected = 34 * sequence * samples * hidden + per_score * rows * sequence + per_row * rows
    assert costs(chain)[1].saved_bytes == expected


@pytest.mark.parametrize("name", ["gpt", "bert-large", "transformer"])
def test_fused_attention_keeps_memory_in_proportion_to_the_sequence(name):
    def saved(sequence, attention):
        chain = analytic_model(name, 1, attention=attention, sequence=sequence)
        return sum(cost.saved_bytes for cost in costs(chain))

    assert saved(8192, "fused") == pytest.approx(2 * saved(4096, "fused"), rel=1e-6)
    assert saved(8192, "materialized") > 3 * saved(4096, "materialized")


def test_relative_positions_leave_one_matrix_of_scores():
    sequence, heads = 384, 16
    one = analytic_model("xlnet-large", 1, sequence=sequence, heads=heads)
    two = analytic_model("xlnet-large", 1, sequence=sequence, heads=heads, attention="materialized")
    scores = heads * sequence * sequence
    # Softmax, mask and what the mask is put on, against the bias and a log-sum-exp per row.
    fewer = scores * (WIDTH + 1 + WIDTH) - scores * WIDTH - 4 * heads * sequence
    assert costs(two)[1].saved_bytes - costs(one)[1].saved_bytes == fewer


def test_fused_attention_computes_its_scores_again():
    fused, materialized = (
        costs(analytic_model(
            "gpt", 1, "a100", layers=1, rates=PEAKS, hidden=1024, heads=8, sequence=4096,
            attention=one,
        ))[1]
        for one in ("fused", "materialized")
    )  # fmt: skip
    flops = 4 * 4096 * 4096 * 1024 / 19.5e12
    scores = 8 * 4096 * 4096 * WIDTH / 1555e9
    # Mask, softmax and dropout read and write the scores; the backward has five products, not four.
    assert materialized.forward_seconds - fused.forward_seconds == pytest.approx(6 * scores)
    assert materialized.input_gradient_seconds - fused.input_gradient_seconds == pytest.approx(
        6 * scores - flops / 2
    )


def test_half_of_the_scores_are_masked_where_attention_has_a_rate():
    """In GPT, not in BERT; a masked attention's backward is slower by the two rates."""
    rates = own_rates(Reached(1.0, 0.0, 1.0, 0.0, attention=0.5, attention_backward=0.25))
    sizes = {"hidden": 1024, "heads": 8, "sequence": 4096}
    flops = 4 * 4096 * 4096 * 1024 / 312e12
    for name, seen in (("gpt", 0.5), ("bert-large", 1.0)):
        whole, apart = (
            costs(analytic_model(name, 1, "a100", precision="bf16", rates=one, **sizes))[1]
            for one in (PEAKS, rates)
        )
        assert apart.forward_seconds - whole.forward_seconds == pytest.approx(
            (seen / 0.5 - 1) * flops
        )
        assert apart.input_gradient_seconds - whole.input_gradient_seconds == pytest.approx(
            2.5 * (seen / 0.25 - 1) * flops
        )


@pytest.mark.parametrize(
    ("name", "copies"), [("gpt", {"logits"}), ("transformer", {"target", "logits"})]
)
def test_a_tied_table_counts_where_its_copies_stand(name, copies):
    chain, once = analytic_model(name), analytic_model(name, tied_copies=False)
    works = {work.name: work for work in named_model(name).layers(1, {})}
    for layer, single in zip(chain.layers, once.layers, strict=True):
        work = works[layer.name]
        assert single.parameter_bytes == work.parameters * WIDTH
        assert (work.tied_parameters > 0) == (layer.name in copies)
        assert layer.parameter_bytes == (work.parameters + work.tied_parameters) * WIDTH
        assert layer.costs[0].forward_seconds == single.costs[0].forward_seconds
    assert "tied weights copied to every layer that uses them" in chain.source
    assert "tied weights in their first layer" in once.source


@pytest.mark.parametrize(("state", "passes"), [(0, 3), (1, 5), (2, 7)])
def test_an_update_moves_weights_gradients_and_state(state, passes):
    chain = analytic_model("gpt", device="a100", rates=PEAKS, optimizer_state=state)
    assert chain.optimizer_bytes_per_parameter_byte == state
    for layer in chain.layers:
        moved = passes * layer.parameter_bytes
        assert layer.costs[0].update_seconds == pytest.approx(moved / 1555e9)
    half = analytic_model(
        "gpt", device="a100", rates=PEAKS, optimizer_state=state, precision="fp16"
    )
    # Masters and state in fp32 are read and written, gradients read, weights written.
    elements = half.layers[1].parameter_bytes / 2
    moved = (2 * 4 * (1 + state) + 2 + 2) * elements
    assert half.layers[1].costs[0].update_seconds == pytest.approx(moved / 1555e9)
    assert half.optimizer_bytes_per_parameter_byte == 2 * (1 + state)


def test_shapes_of_vgg():
    layers = {layer.name: layer for layer in analytic_model("vgg19", 2).layers}
    assert layers["conv1_1"].costs[0].output_bytes == 2 * 64 * 224 * 224 * WIDTH
    assert layers["conv1_1"].costs[0].saved_bytes == 2 * 3 * 224 * 224 * WIDTH
    assert layers["pool5"].costs[0].output_bytes == 2 * 512 * 7 * 7 * WIDTH
    assert layers["fc6"].parameter_bytes == (512 * 7 * 7 * 4096 + 4096) * WIDTH
    assert layers["fc8"].costs[0].output_bytes == 2 * 1000 * WIDTH


def test_shapes_of_resnet_and_inception():
    resnet = {layer.name: layer.costs[0] for layer in analytic_model("resnet50", 1).layers}
    assert resnet["pool1"].output_bytes == 64 * 56 * 56 * WIDTH
    assert resnet["conv2_3"].output_bytes == 256 * 56 * 56 * WIDTH
    assert resnet["conv5_3"].output_bytes == 2048 * 7 * 7 * WIDTH
    inception = costs(analytic_model("inception-v3", 1))
    shapes = [192 * 35 * 35, 256 * 35 * 35, 288 * 35 * 35, 288 * 35 * 35]
    shapes += 5 * [768 * 17 * 17] + [1280 * 8 * 8, 2048 * 8 * 8, 2048 * 8 * 8, 2048]
    assert [cost.output_bytes / WIDTH for cost in inception[6:-1]] == shapes


def test_a_dense_layer_hands_on_and_keeps_all_that_was_concatenated():
    layers = {layer.name: layer.costs[0] for layer in analytic_model("densenet121", 1).layers}
    pixels = {1: 56 * 56, 2: 28 * 28, 3: 14 * 14, 4: 7 * 7}
    counts, channels = (6, 12, 24, 16), 64
    for block, count in enumerate(counts, start=1):
        for i in range(1, count + 1):
            cost = layers[f"dense{block}_{i}"]
            assert cost.output_bytes == (channels + 32) * pixels[block] * WIDTH
            # What each batch norm reads, and what it hands to its convolution.
            assert cost.saved_bytes == 2 * (channels + 4 * 32) * pixels[block] * WIDTH
            channels += 32
        if block < 4:
            channels //= 2
            after = layers[f"transition{block}"].output_bytes
            assert after == channels * pixels[block + 1] * WIDTH
    assert channels == 1024


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "inception-v3", "densenet121"])
def test_larger_images_leave_the_parameters_and_take_flops_by_their_pixels(name):
    small, large = (analytic_model(name, 8, image=image) for image in (500, 1000))
    np.testing.assert_array_equal(small.parameter_bytes, large.parameter_bytes)
    assert seconds(large) == pytest.approx(4 * seconds(small), rel=0.06)
    assert gigaflops(name, image=1000) == pytest.approx(4 * gigaflops(name, image=500), rel=0.06)


def test_the_encoders_output_is_handed_through_the_decoder():
    layers = {layer.name: layer.costs[0] for layer in analytic_model("transformer", 1).layers}
    width = 256 * 512 * WIDTH
    assert layers["encoder6"].output_bytes == width
    assert layers["target"].output_bytes == layers["decoder5"].output_bytes == 2 * width
    assert layers["decoder6"].output_bytes == width


@pytest.mark.parametrize("name", MODELS)
def test_labels_and_gradients(name):
    chain = analytic_model(name)
    assert chain.source.startswith("analytic: v100, fp32 peak 15.7 TFLOP/s, rates pytorch-v100")
    assert chain.microbatch_size == MODELS[name].microbatch_size
    first = costs(chain)[0]
    assert first.input_gradient_seconds == 0  # images and tokens have no gradient
    assert first.weight_gradient_seconds > 0
    for layer, cost in zip(chain.layers, costs(chain), strict=True):
        assert cost.backward_seconds is None
        assert cost.device_kind == "v100"
        assert cost.forward_seconds > 0
        if layer.parameter_bytes == 0:
            assert cost.weight_gradient_seconds == 0
            assert cost.update_seconds == 0


@pytest.mark.parametrize("name", MODELS)
def test_more_samples_cost_more_but_never_more_than_in_proportion(name):
    small, large = analytic_model(name, 2), analytic_model(name, 6)
    np.testing.assert_array_equal(small.parameter_bytes, large.parameter_bytes)
    for few, many in zip(costs(small), costs(large), strict=True):
        assert few.forward_seconds < many.forward_seconds <= 3 * few.forward_seconds * (1 + 1e-12)
        assert many.output_bytes == 3 * few.output_bytes
        assert few.saved_bytes <= many.saved_bytes <= 3 * few.saved_bytes


def test_a_convolution_takes_its_flops_over_the_reached_peak():
    chain = analytic_model("vgg19", 1, rates=own_rates(replace(PEAKS.reached, convolution=0.5)))
    cost = costs(chain)[1]  # 64 to 64 channels at 224 x 224
    product = 2 * 64 * 9 * 64 * 224 * 224 / (0.5 * 15.7e12)
    relu = 2 * 64 * 224 * 224 * WIDTH / 900e9
    assert cost.forward_seconds == pytest.approx(product + relu)
    assert cost.weight_gradient_seconds == pytest.approx(product)
    assert cost.input_gradient_seconds == pytest.approx(product + relu)


def test_throughputs_are_near_published_ones():
    # NVIDIA DeepLearningExamples, one V100 of 16 GB in fp32; ours leaves out the optimizer.
    bert = analytic_model("bert-large", attention="materialized")
    assert 4 / seconds(bert) == pytest.approx(9.85, rel=0.1)
    assert 32 / seconds(analytic_model("resnet50")) == pytest.approx(367, rel=0.1)


def test_faster_devices_and_higher_rates_never_hurt():
    times = [seconds(analytic_model("bert-large", device=kind)) for kind in ("k80", "p100", "v100")]
    assert times == sorted(times, reverse=True)
    assert seconds(analytic_model("bert-large", rates=PEAKS)) < times[-1]


def test_half_precision():
    full = analytic_model("bert-large", device="a100")
    half = analytic_model("bert-large", device="a100", precision="fp16")
    assert seconds(half) < seconds(full) / 3
    np.testing.assert_array_equal(half.parameter_bytes, full.parameter_bytes / 2)
    # 16 bytes per parameter either way: weights, gradients, optimizer.
    assert 2 * (2 + half.optimizer_bytes_per_parameter_byte) == 16
    assert 4 * (2 + full.optimizer_bytes_per_parameter_byte) == 16
    assert "fp16 peak 312" in half.source


def test_several_devices(tmp_path):
    mixed = analytic_model("vgg16", device=["v100", "1080ti"])
    assert [cost.device_kind for cost in mixed.layers[0].costs] == ["v100", "1080ti"]
    assert "v100, fp32" in mixed.source
    assert "1080ti, fp32" in mixed.source
    save_model(mixed, tmp_path / "model.json")
    assert load_model(tmp_path / "model.json") == mixed


@pytest.mark.parametrize(
    ("arguments", "sizes", "message"),
    [
        (("lenet",), {}, "model 'lenet' is not known; known are vgg16, .* bert-N with N layers"),
        (("bert-0",), {}, "model 'bert-0' is not known"),
        (("vgg19", 0), {}, "microbatch_size must be at least 1, got 0"),
        (("vgg19", 1, "abacus"), {}, "device 'abacus' is not known"),
        (("vgg19", 1, []), {}, "at least one device"),
        (("vgg19",), {"hidden": 3}, "no size 'hidden'; there are image, classes"),
        (("bert-large",), {"layers": 3}, "no size 'layers'; there are hidden, heads"),
        (("gpt",), {"layers": 0}, "layers must be a positive integer, got 0"),
        (("gpt",), {"hidden": 2.5}, "hidden must be a positive integer, got 2.5"),
        (("gpt",), {"hidden": 100, "heads": 3}, "must be a multiple of heads"),
        (("gpt",), {"precision": "int8"}, "precision must be fp32, tf32, fp16, bf16 or fp8"),
        (("gpt",), {"attention": "none"}, "attention must be fused or materialized, got 'none'"),
        (("gpt",), {"optimizer_state": 3}, "optimizer_state must be 0, 1 or 2, got 3"),
        (("vgg19",), {"image": 16}, "image is too small: 1 pixels"),
    ],
)
def test_bad_requests_are_refused(arguments, sizes, message):
    with pytest.raises(InputError, match=message):
        analytic_model(*arguments, **sizes)


def test_fp8_multiplies_in_8_bits_and_keeps_bf16():
    """Products take half the time on H100 unless traffic decides; bytes are those of bf16."""
    half, eight = (
        analytic_model("gpt", 8, device="h100", precision=one) for one in ("bf16", "fp8")
    )
    for one, other in zip(half.layers, eight.layers, strict=True):
        a, b = one.costs[0], other.costs[0]
        assert one.parameter_bytes == other.parameter_bytes
        assert (a.saved_bytes, a.output_bytes, a.update_seconds) == (
            b.saved_bytes, b.output_bytes, b.update_seconds,
        )  # fmt: skip
        assert a.forward_seconds * 989 / 1979 <= b.forward_seconds <= a.forward_seconds
    assert seconds(eight) < 0.9 * seconds(half)
    state = "optimizer_bytes_per_parameter_byte"
    assert getattr(half, state) == getattr(eight, state) == 6
    assert "matrix products in fp8, convolutions in bf16" in eight.source
    assert "gradients and activations in bf16, masters and optimizer state in fp32" in eight.source
    images = [analytic_model("vgg16", 4, device="h100", precision=one) for one in ("bf16", "fp8")]
    first = [chain.layers[0].costs[0].forward_seconds for chain in images]
    assert first[0] == first[1]  # convolutions
    with pytest.raises(InputError, match="a100 has no fp8 arithmetic"):
        analytic_model("gpt", device=["h100", "a100"], precision="fp8")
